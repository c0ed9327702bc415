"""The table of JSON Schema keywords: the form of their values, and which compilers hold them.

A compiler *holds* a keyword if each value that it lets through obeys it, and it refuses no value
that does. A grammar says which characters may come next, so it cannot express a keyword that looks
at the whole value, or that excludes names or texts. Answers, and forced calls on mlx, are held by
llguidance, forced calls on vLLM by xgrammar. Each ``_never`` and each condition stands for a case
in which one of them was wrong (llguidance 1.7 and 1.9, xgrammar 0.2.8). A keyword that is not in
the table constrains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from engines.openai.messages import Json

Condition: TypeAlias = Callable[[Any, Json], bool]  # of a value, and of the schema that has it

_MAX_SIZE: Final = 2**31  # xgrammar takes no larger ones, llguidance up to twice as large
_FARTHEST: Final = 2**53  # of numbers: from there on a double is no longer each whole number
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
JOINING: Final = ("$ref", "anyOf", "oneOf", "allOf")  # in the order in which xgrammar reads one
DEFINITIONS: Final = ("$defs", "definitions")

# Patterns that both compilers read as JavaScript does: without lookaround, flags, characters beyond
# ASCII, and characters that JSON escapes.
_ESCAPED: Final = r"\\[dw.*+?()\[\]{}|^$/-]"
_RANGE: Final = r"[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]"
_IN_CLASS: Final = rf"{_RANGE}|{_ESCAPED}|(?!&&|~~|\|\|)[\w !#$%&'*+,./:;<=>?@^`{{|}}~]"
_TIMES: Final = r"(?:[*+?]|\{\d{1,4}(?:,\d{0,4})?\})?+"


def _run(*more: str) -> str:
    """Return the expression of a sequence of items, with groups nested at most three deep."""
    simple = (r"[\w !#%&',/:;<=>@`~-]", _ESCAPED, rf"\[(?!\^)-?(?:{_IN_CLASS})*+-?\]", *more)
    things = "|".join(simple)
    made = rf"(?:(?:{things}){_TIMES})++"
    for _ in range(3):
        made = rf"(?:(?:{things}|\((?:\?:)?{made}(?:\|{made})*+\)){_TIMES})++"
    return made


_WIDE: Final = _run(r"\.", r"\\[sS]", rf"\[\^-?(?:{_IN_CLASS})*+-?\]")
_PLAIN: Final = re.compile(rf"\^?(?:{_WIDE})?\$?(?:\|\^?(?:{_WIDE})?\$?)*", re.ASCII)
# xgrammar matches a pattern with the whole text, and lets ``.`` match no escaped character.
_WHOLE: Final = re.compile(rf"\^(?:{_run()})?\$", re.ASCII)
# In an open object xgrammar lets a property with another name be any value, and its JSON be broken.
_NAME: Final = re.compile(r"[ !#-\[\]-~]*")


def _always(value: Any, node: Json) -> bool:
    return True


def _never(value: Any, node: Json) -> bool:
    return False


class Keyword(NamedTuple):
    """A row of the table. ``is_held`` and ``in_calls`` get a value and the schema that has it."""

    has_form: Callable[[Any], bool] = lambda value: True
    of: str = ""  # the type of the values that it constrains; "" = all
    inner: Literal["", "one", "listed", "named"] = ""  # where its value has schemas
    is_held: Condition = _always  # whether both compilers hold it
    in_calls: Condition = _always  # whether xgrammar does, if ``is_held`` is true
    opens: bool = False  # without it, an object may have properties that no other keyword names


def types_of(node: Json) -> list[str]:
    """Return the types that a well-formed schema names, each once: a list may repeat them."""
    named = node.get("type", [])
    return list(dict.fromkeys(named)) if isinstance(named, list) else [named]


def is_about(keyword: Keyword, node: Json) -> bool:
    """Return whether a schema allows values that a keyword constrains."""
    types = types_of(node)
    kinds = {"number", "integer"} if keyword.of == "number" else {keyword.of}
    return not (keyword.of and types) or bool(kinds.intersection(types))


def have_type(values: list[Any], node: Json) -> bool:
    """Return whether all ``values`` have the type of a schema."""
    types = types_of(node)
    return not types or all(any(_is_of(x, kind) for kind in types) for x in values)


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(x, str) and x in _TYPES for x in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_exact(value: Any, node: Json) -> bool:
    """Return whether a value has no large numbers; llguidance reads them as doubles."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, int | float) and abs(part) > _FARTHEST:
            return False
        waiting += part.values() if isinstance(part, dict) else []
        waiting += part if isinstance(part, list) else []
    return True


def _is_plain(pattern: str, node: Json) -> bool:
    try:
        return bool(_PLAIN.fullmatch(pattern) and re.compile(pattern))
    except re.error:  # a range or a repeat that goes down
        return False


def _is_whole(pattern: str, node: Json) -> bool:
    return "type" in node and bool(_WHOLE.fullmatch(pattern))


def _is_alone_format(value: str, node: Json) -> bool:
    """Return whether no other keyword constrains the text: a grammar may have none for both."""
    pattern = node.get("pattern")
    others = {"const", "enum"} & node.keys() or (pattern is not None and _is_plain(pattern, node))
    return value in FORMATS and not others


def _is_bound(value: Any, node: Json) -> bool:
    """Return whether a bound is a whole number; llguidance takes 2.2 for more than 2.25."""
    return type(value) is int and abs(value) <= _FARTHEST


def _is_divisor_of_integers(value: Any, node: Json) -> bool:
    types = types_of(node)
    return _is_bound(value, node) and "integer" in types and "number" not in types


def _is_typed(value: Any, node: Json) -> bool:
    return "type" in node


def _has_no_bounds(value: Any, node: Json) -> bool:
    return not _BOUNDS.keys() & node.keys()


def _closes_or_has_plain_names(value: Any, node: Json) -> bool:
    return value is False or all(map(_NAME.fullmatch, node.get("properties", ())))


def _has_room(value: Any, node: Json) -> bool:
    return bool(value >= len(node.get("prefixItems", ())))


def _rows(names: str, row: Keyword) -> dict[str, Keyword]:
    return dict.fromkeys(names.split(), row)


_SCHEMA: Final = _is(dict, bool)
_UNHELD: Final = Keyword(is_held=_never)
_BOUNDS: Final = _rows(
    "minimum maximum exclusiveMinimum exclusiveMaximum",
    Keyword(_is_number, "number", is_held=_is_bound, in_calls=_is_typed),
)
KEYWORDS: Final[dict[str, Keyword]] = {
    "type": Keyword(_is_type),
    "const": Keyword(is_held=_is_exact),
    "enum": Keyword(_is_filled, is_held=_is_exact),
    "$ref": Keyword(_is(str), opens=True),
    **_rows("anyOf oneOf allOf", Keyword(_is_filled, inner="listed", opens=True)),
    **_rows("$defs definitions", Keyword(_is(dict), inner="named")),
    # Of objects.
    "properties": Keyword(_is(dict), "object", "named", opens=True),
    "required": Keyword(_is_names, "object", opens=True),
    "additionalProperties": Keyword(
        _SCHEMA, "object", "one", in_calls=_closes_or_has_plain_names, opens=True
    ),
    "patternProperties": Keyword(_is(dict), "object", "named", _never, opens=True),
    "dependentSchemas": Keyword(_is(dict), "object", "named", _never, opens=True),
    **_rows("dependencies dependentRequired", _UNHELD._replace(of="object", opens=True)),
    **_rows("unevaluatedProperties propertyNames", Keyword(_SCHEMA, "object", "one", _never)),
    **_rows("minProperties maxProperties", Keyword(_is_size, "object", is_held=_never)),
    # Of lists.
    "items": Keyword(_SCHEMA, "array", "one"),
    "prefixItems": Keyword(_is_filled, "array", "listed"),
    "minItems": Keyword(_is_size, "array"),
    "maxItems": Keyword(_is_size, "array", in_calls=_has_room),
    **_rows("contains unevaluatedItems", Keyword(_SCHEMA, "array", "one", _never)),
    **_rows("minContains maxContains uniqueItems", _UNHELD._replace(of="array")),
    # Of texts. Each length takes xgrammar up to two seconds of a core.
    **_rows("minLength maxLength", Keyword(_is_size, "string", in_calls=_never)),
    "pattern": Keyword(_is(str), "string", is_held=_is_plain, in_calls=_is_whole),
    "format": Keyword(_is(str), "string", is_held=_is_alone_format, in_calls=_is_typed),
    # Of numbers.
    **_BOUNDS,
    "multipleOf": Keyword(
        _is_divisor, "number", is_held=_is_divisor_of_integers, in_calls=_has_no_bounds
    ),
    # Of all values.
    "not": Keyword(_SCHEMA, "", "one", _never),
    **_rows("if then else", Keyword(_SCHEMA, "", "one", _never, opens=True)),
    **_rows("$dynamicRef $recursiveRef", _UNHELD._replace(opens=True)),
}
# Values with which a keyword constrains nothing.
NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "minProperties": (0,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
# Beside one of these, xgrammar does not read the keywords in ``JOINING``.
OWN: Final = frozenset(
    key for key, row in KEYWORDS.items() if row.of and _never not in (row.is_held, row.in_calls)
)
# A strict schema may lose these: lengths in calls on vLLM, and formats beside a pattern.
SPARED: Final = frozenset({"minLength", "maxLength", "format"})
