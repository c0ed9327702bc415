"""Numbers in JSON schemas that compilers cannot enforce, or that vLLM cannot pass on."""

from __future__ import annotations

from typing import Any, Final

from engines.openai.messages import Json

# llguidance cannot enforce bounds from ``_FARTHEST`` on, as those of ``int64`` and ``float``, nor
# bounds from ``_NEAREST`` on that exclude zero. Upper bounds of integers may reach
# ``_FARTHEST_OF_INTEGERS``, except with xgrammar, which enforces calls on vLLM.
UPPER: Final = frozenset({"maximum", "exclusiveMaximum"})
LOWER: Final = frozenset({"minimum", "exclusiveMinimum"})
_FARTHEST: Final = 2**63 - 512  # from here on the nearest double is 2**63
_NEAREST: Final = 10**18
_FARTHEST_OF_INTEGERS: Final = 2**64
_FINEST: Final = 1e-10  # smallest fractional ``multipleOf``
_OTHERS: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf"})  # may name properties as well
_LARGEST: Final = 2**64 - 1  # limits of integers that vLLM's processes can send each other
_SMALLEST: Final = -(2**63)


def is_enforceable_number(key: str, value: float, node: Json, of_call: bool) -> bool:
    """Return whether a grammar can enforce ``value`` as the bound or divisor ``key``.

    ``of_call``: the schema is for the arguments of a call on vLLM, which xgrammar enforces.
    """
    if key in UPPER | LOWER:
        outwards = value if key in UPPER else -value
        reaches_on = key in UPPER and node.get("type") == "integer" and not of_call
        return -_NEAREST < outwards < (_FARTHEST_OF_INTEGERS if reaches_on else _FARTHEST)
    return key != "multipleOf" or not isinstance(value, float) or value >= _FINEST


def includes_its_bound(key: str, node: Json) -> bool:
    """Return whether llguidance wrongly allows the bound that a keyword excludes.

    It does so if the other bound is less than one away.
    """
    if key not in ("exclusiveMinimum", "exclusiveMaximum") or node.get("type") == "integer":
        return False
    others = UPPER if key == "exclusiveMinimum" else LOWER
    bounds = [node[key], *(node[x] for x in others & node.keys())]
    if not all(type(x) in (int, float) for x in bounds):
        return False
    return any(abs(x - bounds[0]) < 1 for x in bounds[1:])


def holds_number(key: str, value: Any, node: Json) -> bool:
    """Return whether a grammar can enforce ``minProperties`` or ``maxProperties``."""
    if not _has_optional(node):
        named = node.get("properties")
        is_too_large = isinstance(named, dict) and key == "minProperties" and value > len(named)
        return not is_too_large and not _OTHERS & node.keys()
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    needs_one = bool(node.get("required"))
    return value == 1 and (key == "minProperties" if needs_one else is_closed)


def _has_optional(node: Json) -> bool:
    named, required = node.get("properties"), node.get("required")
    if not isinstance(named, dict):
        return False
    return not isinstance(required, list) or any(name not in required for name in named)


def sendable(value: Any) -> Any:
    """Return a JSON value with floats in place of integers beyond 64 bits.

    Raises:
        OverflowError: such an integer has no equal float.
    """
    if isinstance(value, list):
        return [sendable(x) for x in value]
    if isinstance(value, dict):
        return {key: sendable(x) for key, x in value.items()}
    if isinstance(value, int) and not _SMALLEST <= value <= _LARGEST:
        if int(written := float(value)) != value:
            raise OverflowError(value)
        return written
    return value
