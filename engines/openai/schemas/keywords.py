"""The JSON schemas that an answer or a call must obey, without unsupported keywords.

A keyword that no grammar can express is left out and named; a schema with ``strict`` is refused
instead, as by OpenAI.
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
    """A JSON schema that an answer, or the arguments of a call, must obey."""

    field: str  # the request's field
    name: str  # the name in OpenAI's errors
    schema: Json
    strict: bool
    of_call: bool = False  # for the arguments of a call, not for an answer
    on_mlx_only: bool = False  # only mlx enforces it; others enforce the answer's format at most
    on_vllm: bool = False  # vLLM enforces it, with another compiler for calls than for answers

    def check(self) -> None:
        """Raise ``FieldError`` for an endless ref, and for a keyword that a strict schema lacks."""
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
        """The keywords of the schema that its grammar lacks."""
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
    """Return the schemas of a request's ``response_format`` and ``structured_outputs``."""
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
    """Return the schemas of functions that are strict, or whose call is forced.

    Args:
        beside_format: the answer has a format; mlx then also enforces the schemas of all calls that
            may replace the answer.
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
    """Return the keywords that the grammars of checked schemas lack at an engine, sorted.

    Raises:
        InvalidRequest: a strict schema has such a keyword.
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
    """Return a schema parsed if it was sent as JSON text; any other value unchanged."""
    if isinstance(schema, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(schema)
    return schema


def with_known_keywords(
    raw: Json, held: Iterable[HeldSchema], engine: str
) -> tuple[Json, list[str]]:
    """Return a checked body's fields with schemas, in the form for an engine.

    Returns:
        The changed fields, and the keywords that were left out (see ``left_out``).
    """
    tools, misplaced = with_well_formed_tools(raw)
    keywords = misplaced.union(left_out(held, engine))
    return {**tools, **with_enforceable_formats(raw, engine)}, sorted(keywords)


def with_enforceable_formats(raw: Json, engine: str) -> Json:
    """Return a checked body's fields with the answer's schema, in enforceable form."""
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
