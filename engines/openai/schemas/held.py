"""Finds the JSON schemas of a request, writes them for the engine, and refuses strict ones.

A keyword that no compiler holds is left out and reported. A ``strict`` schema that has one is
refused, as at OpenAI.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from engines.openai.errors import FieldError, InvalidRequest
from engines.openai.messages import Json, NamedTool, ResponseFormat, Tool
from engines.openai.schemas.enforceable import LeftOut, enforceable
from engines.openai.schemas.refs import Refs


class HeldSchema(NamedTuple):
    """A JSON schema to which an answer is held."""

    field: str  # of the request
    name: str  # as OpenAI's errors name it
    schema: Json
    strict: bool
    of_call: bool = False  # the arguments of one, and no answer
    on_mlx_only: bool = False  # True: only our mlx engine enforces it
    on_vllm: bool = False  # True: vLLM serves, and compiles calls with xgrammar

    def check(self) -> None:
        """Raise ``FieldError`` if the schema is endless, or strict and loses a keyword."""
        made, found = self._written()
        if ref := Refs(made).endless:
            raise FieldError(
                self.field,
                f"Invalid schema for {self.name}: the $ref {ref[:100]!r} leads back to itself, so"
                " it describes no value: let it refer to a schema of its own",
            )
        refused = [x for x in found if self.strict and not x.spared]
        for path, keyword, words, _ in refused:
            why = f"{words}, which strict does not permit: mend it"
            raise FieldError(
                self.field,
                f"Invalid schema for {self.name}: in context={path!r},"
                f" {why if words else f'{keyword!r} is not permitted with strict: leave it out'},"
                " or set strict to false",
            )

    @property
    def left_out(self) -> set[str]:
        """The keywords that are left out of the schema."""
        return {left.keyword for left in self._written()[1]}

    def _written(self) -> tuple[Json, list[LeftOut]]:
        found: list[LeftOut] = []
        reader: Literal["xgrammar", "llguidance"] = (
            "xgrammar" if self.on_vllm and self.of_call else "llguidance"
        )
        return enforceable(self.schema, reader, found.append), found


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
    """Return the sorted keywords that are left out of checked schemas for an engine.

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
    """Parse a schema that was sent as text; return anything else, or bad JSON, unchanged."""
    if isinstance(schema, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(schema)
    return schema


def with_known_keywords(
    raw: Json, held: Iterable[HeldSchema], engine: str
) -> tuple[Json, list[str]]:
    """Return the fields of a checked body that have schemas, written for the engine.

    The second result is the sorted keywords that they lose.
    """
    tools, formless = with_well_formed_tools(raw)
    keywords = formless.union(left_out(held, engine))
    return {**tools, **with_enforceable_formats(raw)}, sorted(keywords)


def with_well_formed_tools(raw: Json) -> tuple[Json, set[str]]:
    """Return ``tools`` as templates can show them, and the keywords that they lose.

    The first result is empty if nothing changes.
    """
    found: list[LeftOut] = []
    tools = raw.get("tools") or []
    mended = []
    for tool in tools:
        function = tool["function"]
        if function.get("parameters") is not None:
            shown = enforceable(function["parameters"], "template", found.append)
            function = {**function, "parameters": shown}
        mended.append({**tool, "function": function})
    return {} if mended == tools else {"tools": mended}, {x.keyword for x in found}


def with_enforceable_formats(raw: Json) -> Json:
    """Return the fields of a checked body with an answer's schema, as it can be enforced."""
    made: Json = {}
    form, outputs = raw.get("response_format") or {}, raw.get("structured_outputs") or {}
    named = form.get("json_schema") or {}
    if isinstance(schema := named.get("schema"), dict):
        json_schema = {**named, "schema": enforceable(schema)}
        made["response_format"] = {**form, "json_schema": json_schema}
    if isinstance(schema := read_schema(outputs.get("json")), dict):
        made["structured_outputs"] = {**outputs, "json": enforceable(schema)}
    return made
