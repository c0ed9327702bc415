"""The JSON schemas of a request: those that hold an answer or a call, without unknown keywords.

A keyword that no grammar has is left out and named; a client that says ``strict`` wants all of them
or a refusal, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from engines.openai.errors import FieldError, InvalidRequest
from engines.openai.messages import Json, NamedTool, ResponseFormat, Tool
from engines.openai.schemas.enforceable import Compiler, LeftOut, enforceable
from engines.openai.schemas.refs import endless_ref
from engines.openai.schemas.vllm_check import excludes_quotes, passing
from engines.openai.schemas.well_formed import misfits, with_well_formed_tools


class HeldSchema(NamedTuple):
    """A JSON schema to which an answer is held."""

    field: str  # of the request
    name: str  # as OpenAI's errors name it
    schema: Json
    strict: bool
    of_call: bool = False  # the arguments of one, and no answer
    on_mlx_only: bool = False  # others hold an answer to its format alone, or to nothing
    on_vllm: bool = False  # which holds calls by another compiler than answers, and checks both

    def check(self) -> None:
        """Refuse what cannot be left out. Raises ``FieldError``."""
        if ref := endless_ref(self.schema):
            raise FieldError(
                self.field,
                f"Invalid schema for {self.name}: the $ref {ref[:100]!r} leads back to itself, so"
                " it describes no value: let it refer to a schema of its own",
            )
        if self.strict:
            for misfit in misfits(self.schema):
                raise FieldError(
                    self.field,
                    f"Invalid schema for {self.name}: in context={misfit.path!r}, {misfit.words},"
                    " which strict does not permit: mend it, or set strict to false",
                )
            for path, keyword, spared in self._left_out():
                if not spared:
                    raise FieldError(
                        self.field,
                        f"Invalid schema for {self.name}: in context={path!r}, {keyword!r} is not"
                        " permitted with strict: leave it out, or set strict to false",
                    )

    @property
    def left_out(self) -> set[str]:
        """The keywords that its grammar does not have."""
        found = {left.keyword for left in self._left_out()}
        return found | {misfit.keyword for misfit in misfits(self.schema)}

    def _left_out(self) -> list[LeftOut]:
        found: list[LeftOut] = []
        compiler: Compiler = "xgrammar" if self.on_vllm and self.of_call else "llguidance"
        made = enforceable(self.schema, compiler, found.append)
        if self.on_vllm and not self.of_call and excludes_quotes(made):
            found.append(LeftOut((), "pattern"))
        return found


def held_formats(form: ResponseFormat | None, outputs: Json | None) -> list[HeldSchema]:
    """List the schemas of a request's ``response_format`` and ``structured_outputs``."""
    found = []
    named = form.json_schema if form is not None else None
    if named is not None and named.schema is not None:
        name = f"response_format {named.name!r}"
        found.append(HeldSchema("response_format", name, named.schema, bool(named.strict)))
    if isinstance(schema := read_schema((outputs or {}).get("json")), dict):
        found.append(HeldSchema("structured_outputs.json", "structured_outputs", schema, False))
    return found


def held_tools(
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedTool | None,
    beside_format: bool,
) -> list[HeldSchema]:
    """List the schemas of functions that are strict, or whose call is forced.

    Args:
        beside_format: of an answer; then mlx holds all calls that may come in its place.
    """
    if choice == "none":
        return []
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return [
        HeldSchema(
            f"tools[{i}].function.parameters",
            f"function {tool.function.name!r}",
            tool.function.parameters,
            bool(tool.function.strict),
            of_call=True,
            on_mlx_only=not (tool.function.strict or choice == "required" or named is not None),
        )
        for i, tool in enumerate(tools)
        if tool.function.parameters is not None
        and (
            tool.function.strict
            or choice == "required"
            or tool.function.name == named
            or (beside_format and named is None)
        )
    ]


def left_out(schemas: Iterable[HeldSchema], engine: str) -> list[str]:
    """List the keywords that the grammars of checked schemas do not have at an engine.

    Raises:
        InvalidRequest: a strict one has such a keyword.
    """
    on_vllm = engine == "vllm"
    held = [x._replace(on_vllm=on_vllm) for x in schemas if engine == "mlx" or not x.on_mlx_only]
    try:
        for schema in held if on_vllm else ():
            schema.check()
    except FieldError as error:
        raise InvalidRequest(f"{error.field}: {error}", error.field) from error
    return sorted({keyword for schema in held for keyword in schema.left_out})


def read_schema(schema: object) -> object:
    """Return a schema that was sent as text as an object; what is no JSON, as it is."""
    if isinstance(schema, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(schema)
    return schema


def with_known_keywords(
    raw: Json, held: Iterable[HeldSchema], engine: str
) -> tuple[Json, list[str]]:
    """Return the fields of a checked body that hold schemas, as they can be used there.

    Returns the keywords that they lose as well; see ``left_out``.
    """
    tools, misplaced = with_well_formed_tools(raw)
    keywords = misplaced.union(left_out(held, engine))
    return {**tools, **with_enforceable_formats(raw, engine)}, sorted(keywords)


def with_enforceable_formats(raw: Json, engine: str) -> Json:
    """Return the fields of a checked body that hold its answer's schema, as it can be enforced."""
    made: Json = {}

    def written(schema: Json) -> Json:
        known = enforceable(schema)
        return passing(known) if engine == "vllm" else known

    form, outputs = raw.get("response_format") or {}, raw.get("structured_outputs") or {}
    named = form.get("json_schema") or {}
    if isinstance(schema := named.get("schema"), dict):
        made["response_format"] = {**form, "json_schema": {**named, "schema": written(schema)}}
    if isinstance(schema := read_schema(outputs.get("json")), dict):
        made["structured_outputs"] = {**outputs, "json": written(schema)}
    return made
