"""Finds the keywords that xgrammar takes and does not enforce: vLLM holds calls to schemas by it.

Each was measured with xgrammar 0.2.8: it accepts values that break them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from engines.openai.messages import Json

_OF_TEXTS: Final = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_NUMBERS: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# Not read beside a ``$ref`` or choices.
BESIDE: Final = frozenset(
    {"properties", "required", "additionalProperties", "items", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "minimum", "maximum", "enum", "const"}
)
# The keyword that is read first, and the others that are not read beside it.
_FIRST: Final = {
    "const": _OF_TEXTS | _OF_NUMBERS | {"enum"},
    "enum": _OF_TEXTS | _OF_NUMBERS,
    "format": _OF_TEXTS - {"format"},
    "pattern": _OF_TEXTS - {"format", "pattern"},
}
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def ignored_in_calls(node: Json) -> Iterator[str]:
    """Yield the keywords of one schema that are not enforced, or beside which others are not."""
    parts = node.get("allOf")
    if isinstance(parts, list) and (len(parts) > 1 or BESIDE & node.keys()):
        yield "allOf"
    for key in ("$ref", "anyOf", "oneOf"):
        if key in node and BESIDE & node.keys():
            yield key
    named, needed = node.get("properties"), node.get("required")
    if isinstance(needed, list) and not set(map(str, needed)) <= (
        named.keys() if isinstance(named, dict) else set()
    ):
        yield "required"
    yield from _ignored_of_values(node)


def _ignored_of_values(node: Json) -> Iterator[str]:
    first = next((x for x in _FIRST if x in node), "")
    ignored = _FIRST.get(first, frozenset()) & node.keys()
    if "type" not in node and first not in ("const", "enum"):
        ignored |= (_OF_TEXTS | _OF_NUMBERS) & node.keys()
    yield from sorted(ignored)
    values = [node["const"]] if first == "const" else node.get("enum")
    if isinstance(values, list) and first and not all(_fits(x, node.get("type")) for x in values):
        yield "type"


def _fits(value: object, types: object) -> bool:
    names = types if isinstance(types, list) else [types]
    if isinstance(value, bool):
        return bool({"boolean", None} & set(map(_name, names)))
    kinds = [_KINDS.get(_name(x) or "", (object,)) for x in names]
    return any(isinstance(value, x) for x in kinds)


def _name(kind: object) -> str | None:
    return kind if isinstance(kind, str) else None
