"""Finds malformed parts of a JSON schema, and removes them.

Examples are a property whose schema is a text, a type that does not exist, and a bound that is not
a number. Compilers refuse a schema with such a part, and chat templates may fail on it. A malformed
schema is replaced by one that allows any value; any other malformed keyword is removed. Null counts
as absent.

Forms of older drafts are rewritten for the latest draft, since compilers support no others: a list
of ``items`` becomes ``prefixItems``, and a size like ``3.0`` becomes ``3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

from engines.openai.messages import Json
from engines.openai.schemas.refs import BY_NAME, LISTED, target

Path: TypeAlias = tuple[str, ...]

_EXCLUSIVE: Final = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


class Misfit(NamedTuple):
    """A malformed part of a schema."""

    path: Path  # path of the schema with the keyword, or of the value that is not a schema
    keyword: str
    words: str  # the error, as a clause of a sentence


def misfits(schema: object) -> list[Misfit]:
    """Return all malformed parts of a schema; without recursion, as schemas may be deep."""
    return list(_misfits(schema))


def well_formed(schema: Json) -> Json:
    """Return a copy of a schema without malformed parts, in the form of the latest draft."""
    made: Json = _mended(schema, schema)
    return made


def with_well_formed_tools(raw: Json) -> tuple[Json, set[str]]:
    """Return a checked chat's ``tools`` with well-formed schemas, and the removed keywords.

    The first value is {} if the tools need no change.
    """
    tools = raw.get("tools") or []
    found = [x for tool in tools for x in misfits(tool["function"].get("parameters"))]
    mended = [_mended_tool(x) for x in tools]
    return {} if mended == tools else {"tools": mended}, {x.keyword for x in found}


def _mended_tool(tool: Json) -> Json:
    function = tool["function"]
    if function.get("parameters") is None:
        return tool
    return {**tool, "function": {**function, "parameters": well_formed(function["parameters"])}}


def _misfits(schema: object) -> Iterator[Misfit]:
    waiting: list[tuple[Path, str, Any]] = [((), "", schema)]
    while waiting:
        path, keyword, node = waiting.pop()
        if not isinstance(node, dict):
            if node is not None and not isinstance(node, bool):
                yield Misfit(path, keyword, f"{str(node)[:40]!r} is not a JSON schema")
            continue
        inner: list[tuple[Path, str, Any]] = []
        for key, value in node.items():
            if value is None:
                continue
            if not _fits(key, value, node):
                yield Misfit(path, key, f"{key!r} cannot be {str(value)[:40]!r}")
                continue
            inner += [((*path, key, *where), key, x) for where, x in _inner(key, value)]
        waiting += reversed(inner)


def _inner(key: str, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas in a well-formed keyword's value, each with its path there."""
    if key in BY_NAME:
        yield from (((name,), x) for name, x in value.items())
    elif key in _ONE and not isinstance(value, list):
        yield (), value
    elif key in _ONE or key in LISTED:
        yield from (((str(i),), x) for i, x in enumerate(value))


def _mended(node: Any, root: Json) -> Any:
    if not isinstance(node, dict):
        return node if isinstance(node, bool) else {}
    made: Json = {}
    for key, value in _of_latest_draft(node).items():
        if key in _FORMS and (value is None or not _FORMS[key](value)):
            continue
        if key in BY_NAME:
            value = {name: _mended(x, root) for name, x in value.items()}
        elif isinstance(value, list) and key in LISTED:
            value = [_mended(x, root) for x in value]
        elif key in _ONE:
            value = _mended(value, root)
        elif key in _SIZES:
            value = int(value)
        elif key == "$ref":
            value = _moved(value, root)
        made[key] = value
    return made


def _of_latest_draft(node: Json) -> Json:
    names = _newer_names(node)
    made = {
        names.get(key, key): value
        for key, value in node.items()
        if not (names and key == "items" and "prefixItems" in node)
    }
    for bound, exclusive in _EXCLUSIVE.items():  # booleans, in drafts up to the fourth
        if isinstance(excluded := made.get(exclusive), bool):
            del made[exclusive]
            if excluded and bound in made:
                made[exclusive] = made.pop(bound)
    return made


def _newer_names(node: Json) -> dict[str, str]:
    """Return the latest draft's names of keywords, if ``items`` is a list as in older drafts."""
    is_tuple = isinstance(node.get("items"), list)
    return {"items": "prefixItems", "additionalItems": "items"} if is_tuple else {}


def _moved(ref: str, root: Json) -> str:
    """Return a ``$ref`` that leads to the same schema once ``root`` is rewritten."""
    steps = ref.split("/")
    place: Any = root
    i = 1
    while i < len(steps) and isinstance(place, dict):
        key = steps[i]
        place, steps[i] = place.get(key), _newer_names(place).get(key, key)
        if key in BY_NAME or (key in (*_ONE, *LISTED) and isinstance(place, list)):
            place = target(place, "#/" + steps[i + 1]) if i + 1 < len(steps) else None
            i += 1
        elif key not in _ONE:
            break
        i += 1
    return "/".join(steps)


def _fits(key: str, value: object, node: Json) -> bool:
    """Return whether a keyword's value is well-formed; ``items`` must not mix two drafts."""
    if key == "items" and isinstance(value, list) and "prefixItems" in node:
        return False
    return key not in _FORMS or _FORMS[key](value)


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(x, str) and x in _TYPES for x in names)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_size(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < _MAX_SIZE and value == int(value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_divisor(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and value > 0


def _is(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kinds)


# The keywords whose values are one schema (``items`` may also be a list).
_ONE: Final = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties") + (
    "unevaluatedItems",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_SIZES: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_SIZE: Final = 2**31  # xgrammar's limit; llguidance's is twice as large
_FORMS: Final[dict[str, Callable[[object], bool]]] = {
    **dict.fromkeys(BY_NAME, _is(dict)),
    **dict.fromkeys(LISTED, _is_list),
    **dict.fromkeys(_ONE, _is(dict, bool)),
    "items": _is(dict, bool, list),
    "type": _is_type,
    "required": _is_names,
    "enum": _is_list,
    **dict.fromkeys(("pattern", "format", "$ref"), _is(str)),
    **dict.fromkeys(_SIZES, _is_size),
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    # In drafts up to the fourth, these are booleans.
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is(int, float)),
    "multipleOf": _is_divisor,
}  # fmt: skip
