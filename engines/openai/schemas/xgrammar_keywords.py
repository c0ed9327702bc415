"""Keywords that xgrammar, which enforces the schemas of calls on vLLM, reads differently.

It accepts some without enforcing them, refuses some, and for some forbids values that the schema
allows. All this was found by trying xgrammar 0.2.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from engines.openai.messages import Json

LENGTHS: Final = frozenset({"minLength", "maxLength"})  # each takes up to two CPU seconds
_OF_TEXTS: Final = frozenset({"pattern", "format"})
_OF_NUMBERS: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_FORGOTTEN: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema"}
)
_BOUNDS: Final = _OF_NUMBERS - {"multipleOf"}
# Keywords that are ignored beside a ``$ref`` or choices.
BESIDE: Final = frozenset(
    {"enum", "const", "items", "minItems", "maxItems", "prefixItems", "properties", "required"}
    | {"additionalProperties", "patternProperties", "minProperties", "maxProperties"}
    | {*_OF_TEXTS, *_OF_NUMBERS}
)
# A keyword, and those that are ignored beside it; the first one found counts.
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


_WHOLE: Final = {  # rounds a fractional bound of an integer to the equivalent integer
    "minimum": math.ceil,
    "exclusiveMaximum": math.ceil,
    "maximum": math.floor,
    "exclusiveMinimum": math.floor,
}


def written_out(node: Json) -> Json:
    """Return one schema, completed where xgrammar would refuse it or forbid allowed values.

    Otherwise xgrammar would allow no items in a list with bounds, and no required properties in an
    object that does not define them.
    """
    made = _merged(node)
    first = made.get("prefixItems")
    if not isinstance(first, list):
        first = None
    else:
        most = made.get("maxItems")
        cut = first[: int(most)] if isinstance(most, int | float) and most >= 0 else first
        first = made["prefixItems"] = [{} if x is True else x for x in cut]
    least = made.get("minItems")
    needs_more = isinstance(least, int | float) and least > len(first or ())
    if "items" not in made and (needs_more or ("maxItems" in made and not first)):
        made["items"] = True
    _open(made)
    types = made.get("type")
    names = types if isinstance(types, list) else [types]
    if "integer" in names and "number" not in names:
        for key, whole in _WHOLE.items():
            if isinstance(bound := made.get(key), float) and math.isfinite(bound):
                made[key] = whole(bound)
    return made


def _merged(node: Json) -> Json:
    """Return a schema merged with the only branch of its ``allOf``, if no keywords conflict."""
    parts = node.get("allOf")
    part = parts[0] if isinstance(parts, list) and len(parts) == 1 else None
    beside = {key: value for key, value in node.items() if key != "allOf"}
    if not isinstance(part, dict) or not (BESIDE | {"type"}) & beside.keys():
        return dict(node)
    if "$ref" in part or any(beside.get(key, value) != value for key, value in part.items()):
        return dict(node)
    return beside | part


def _open(made: Json) -> None:
    named, needed = made.get("properties", {}), made.get("required", [])
    if not isinstance(named, dict):
        return
    if False in named.values():
        made["properties"] = named = {k: x for k, x in named.items() if x is not False}
    if {"additionalProperties", "patternProperties"} & made.keys():
        return
    if isinstance(needed, list) and any(x not in named for x in needed if isinstance(x, str)):
        made["properties"] = named | {x: True for x in needed if isinstance(x, str)} | named
    elif not named and {"minProperties", "maxProperties"} & made.keys():
        made["additionalProperties"] = True


def ignored_in_calls(node: Json) -> Iterator[str]:
    """Yield the keywords of one schema that xgrammar ignores, or that make it ignore others."""
    parts = node.get("allOf")
    if isinstance(parts, list) and (len(parts) > 1 or BESIDE & node.keys()):
        yield "allOf"
    for key in ("$ref", "anyOf", "oneOf"):
        if key in node and BESIDE & node.keys():
            yield key
    if "$ref" in node and {"anyOf", "oneOf", "allOf", "type"} & node.keys():
        yield "$ref"
    for key in {"anyOf", "oneOf", "allOf"} & node.keys():
        if not BESIDE & node.keys() and not _all_say(node[key], node.get("type")):
            yield "type"
    named, needed = node.get("properties"), node.get("required")
    if isinstance(needed, list) and not set(map(str, needed)) <= (
        named.keys() if isinstance(named, dict) else set()
    ):
        yield "required"
    if "multipleOf" in node and (node.get("type") == "number" or _BOUNDS & node.keys()):
        yield "multipleOf"
    yield from _ignored_of_values(node)


def _all_say(parts: object, kind: object) -> bool:
    """Return whether all branches restrict values to ``kind``, which is ignored beside them."""
    if kind is None or not isinstance(parts, list):
        return True
    return all(isinstance(x, dict) and _says(x, kind) for x in parts)


def _says(part: Json, kind: object) -> bool:
    """Return whether a branch certainly restricts its values to a type."""
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list):
        return all(_fits(x, kind) for x in values)
    types, kinds = (x if isinstance(x, list) else [x] for x in (part.get("type"), kind))
    return "$ref" in part or all(x in kinds for x in types)  # the ref's target has its own type


def conflates(nodes: Iterable[Json]) -> bool:
    """Return whether xgrammar may confuse two of these schemas.

    Its cache key leaves out annotations, and by mistake also properties with names of annotations.
    """
    for node in nodes:
        values = [node.get("const"), *_listed(node.get("enum"))]
        names = node.get("properties")
        if any(isinstance(x, dict) for x in values) or (
            isinstance(names, dict) and _FORGOTTEN & names.keys()
        ):
            return True
    return False


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


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
