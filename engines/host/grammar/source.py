"""Writes the text of a grammar: calls of given functions, or JSON that obeys a schema.

The language is llguidance's Lark, in which every schema is a grammar of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from engines.openai.messages import Json, ResponseFormat, Tool

# Between two lines of calls lies a line break; so there is none inside a call.
_MAX_CALLS: Final = 8
_IN_CALLS: Final = {"whitespace_pattern": " ?", "coerce_one_of": True}
# Bounded: a small model left free to indent may never stop doing so.
_IN_ANSWERS: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "coerce_one_of": True}
# Where schemas stand inside a schema: values of other keys may look like one and be none.
_ONE_SCHEMA: Final = frozenset({"items"})
_MANY_SCHEMAS: Final = frozenset({"properties", "$defs", "definitions"})
_LISTED_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "prefixItems"})
# An object that has one of these says itself what else it may have.
_OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf"}
)


class GrammarWish(NamedTuple):
    """The calls and the answer that a grammar is to allow.

    ``many``: several calls may follow one another. ``answer``: the JSON schema of an answer without
    calls; None = there must be a call.
    """

    tools: Sequence[Tool]
    many: bool
    answer: Json | None

    @property
    def param(self) -> str:
        """The request's field that asks for it."""
        return "tools" if self.answer is None else "response_format"


class OneSchema(msgspec.Struct, frozen=True):
    """A schema of a grammar by itself, to find the one that is wrong."""

    param: str
    schema: Json
    options: Json


class GrammarSource(msgspec.Struct, frozen=True):
    """A grammar as text, and the schemas that went into it."""

    text: str
    param: str
    schemas: list[OneSchema]


def answer_schema(wanted: ResponseFormat | None) -> Json | None:
    """The JSON schema that a response_format asks for; None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        return {"type": "object"}
    return wanted.json_schema.schema


def call_header(name: str) -> str:
    """The beginning of a function's call; its arguments, a JSON object, and ``}`` follow."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


def arguments_schema(tool: Tool) -> Json:
    """The JSON schema of a function's arguments; without parameters, of an empty object.

    Clients write a function without parameters as ``properties: {}``, too.
    """
    given = tool.function.parameters or {"properties": {}}
    opens = (_OPENING | {"allOf"}) & given.keys() or given.get("required")
    if given.get("properties") == {} and not opens:
        given = {**given, "additionalProperties": False}
    return {"type": "object", **given}


def source_of(wish: GrammarWish) -> GrammarSource:
    """Write a grammar: calls of functions, one a line, or JSON of an answer.

    Every schema is a grammar of its own, so ``$ref`` keeps pointing into its own root.
    """
    tools, many, answer = wish
    starts = ["calls"] if tools else []
    rules, schemas = [], []
    if tools:
        more = f' ("\\n" call){{0,{_MAX_CALLS - 1}}}' if many else ""
        rules.append(f"calls: call{more}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        schema = OneSchema(f"tools[{i}].function.parameters", arguments_schema(tool), _IN_CALLS)
        schemas.append(schema)
        rules.append(f'call_{i}: {json.dumps(call_header(tool.function.name))} args_{i} "}}"')
        rules.append(f"args_{i}: {_embedded(schema)}")
    if answer is not None:
        schemas.append(OneSchema("response_format", answer, _IN_ANSWERS))
        starts.append("answer")
        rules.append(f"answer: {_embedded(schemas[-1])}")
    text = "\n".join([f"start: {' | '.join(starts)}", *rules])
    return GrammarSource(text, wish.param, schemas)


def _embedded(schema: OneSchema) -> str:
    return "%json " + json.dumps({**closed(schema.schema), "x-guidance": schema.options})


def closed(schema: Json) -> Json:
    """Close every object that names its properties and does not say whether it has more.

    A weak model adds properties without end where it may. Schemas that are put together by
    ``allOf`` stay as they are: a part that is closed would refuse the other's properties.
    """
    if _mentions(schema, "allOf"):
        return schema
    shut: Json = _closed(schema)
    return shut


def _mentions(node: Any, key: str) -> bool:
    if isinstance(node, dict):
        return key in node or any(_mentions(x, key) for x in node.values())
    return isinstance(node, list) and any(_mentions(x, key) for x in node)


def _closed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    shut = dict(node)
    for key in _ONE_SCHEMA & node.keys():
        shut[key] = _closed(node[key])
    for key in _MANY_SCHEMAS & node.keys():
        if isinstance(node[key], dict):
            shut[key] = {name: _closed(x) for name, x in node[key].items()}
    for key in _LISTED_SCHEMAS & node.keys():
        if isinstance(node[key], list):
            shut[key] = [_closed(x) for x in node[key]]
    if _is_closable(node):
        shut["additionalProperties"] = False
    return shut


def _is_closable(node: Json) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not named or _OPENING & node.keys():
        return False
    return isinstance(required, list) and all(x in named for x in required)
