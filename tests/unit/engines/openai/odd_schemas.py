"""Random JSON schemas with odd and malformed parts, and values that obey them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from random import Random
from typing import Any, Final

from jsonschema import Draft202012Validator

from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.keywords import KEYWORDS, OWN

DEFINED: Final = ("A", "B C/~")
REFS: Final = ("#", "#/$defs/A", "#/$defs/B%20C~1~0", "#/definitions/A", "#/properties/a", "#/x")
TEXTS: Final = ("", "a", "ab", "b-1", '"', "\\", "é\nx", "2020-01-02", "x@example.com")
PATTERNS: Final = ("^a", "b$", "^[a-z]+$", "^(ab+)?$", "^(a|b-[0-9])$", "(?!a)b", "^[^a]*$")
MORE_PATTERNS: Final = ("a|^b$", "^.$", '"', r"^\S+$", r"^\w-\d{1,2}$", "é", "", "^$", "(?i)A")
MALFORMED: Final = ("x", 5, [], {}, True, [1], -1.5, None, [{}], {"a": 1})
ODD: Final[dict[str, Any]] = {
    "not": {"const": 1},
    "if": {"required": ["a"]},
    "then": {"properties": {"b": {"type": "integer"}}},
    "dependentRequired": {"a": ["b"]},
    "propertyNames": {"pattern": "^[a-z]+$"},
    "patternProperties": {"^[xt]": {"type": "integer"}},
    "properties": {"a": True, "b": False},
    "contains": {"type": "null"},
    "required": ["z"],
    "type": "any",
    "$schema": "http://json-schema.org/draft-07/schema#",
} | {"uniqueItems": True, "minProperties": 1, "unevaluatedProperties": False, "x-order": 3}


class OddSchemas:
    """Makes schemas and values by chance; bounds in one schema do not contradict each other."""

    def __init__(self, chance: Random, *, odd: bool = True) -> None:
        self._pick = chance.choice
        self._chance = chance
        self._is_odd = odd
        self._may_refer = True  # in the place of a value that is described; in its parts always

    def root(self) -> dict[str, Any]:
        made = self.schema(3)
        self._may_refer = False
        for where in ("$defs", "definitions"):
            made |= self._some(**{where: {name: self.schema(2) for name in DEFINED}})
        return made

    def schema(self, depth: int) -> dict[str, Any]:
        kind = self._pick(["text", "number", "values", "ref", *["object", "list", "any"] * depth])
        made: dict[str, Any] = getattr(self, f"_{kind}")(depth)
        if depth and self._chance.random() < 0.2:
            key = self._pick(("anyOf", "anyOf", "oneOf", "allOf"))
            made[key] = [self.schema(depth - 1) for _ in range(self._pick((1, 2)))]
        if self._is_odd and self._chance.random() < 0.4:
            made = {key: ODD[key] for key in self._chance.sample(list(ODD), 2)} | made
        if self._is_odd and made and self._chance.random() < 0.1:
            made[self._pick(list(made))] = self._pick(MALFORMED)
        return made

    def _some(self, **given: Any) -> dict[str, Any]:
        return {key: x for key, x in given.items() if self._chance.random() < 0.4}

    def _typed(self, name: str) -> dict[str, Any]:
        named = self._pick((name, name, name, [name, "null"], None))
        return {} if named is None else {"type": named}

    def _text(self, depth: int) -> dict[str, Any]:
        pattern, length = self._pick((*PATTERNS, *MORE_PATTERNS)), self._pick((3.0, 12))
        kind = self._pick(("date", "email", "int64"))
        given = self._some(pattern=pattern, format=kind, minLength=1, maxLength=length)
        return self._typed("string") | given

    def _number(self, depth: int) -> dict[str, Any]:
        low = {"minimum": self._pick((0, -2.25, -(2**63), 2.0))}
        low |= {"exclusiveMinimum": self._pick((0, -1.5, True, -(2**53)))}
        high = {
            "maximum": self._pick((20, 9.75, 2**64)),
            "exclusiveMaximum": self._pick((30, False)),
        }
        divisor = self._pick((1, 2, 0.5, 1e-9))
        kind = self._typed(self._pick(("integer", "number")))
        return kind | self._some(**low, **high, multipleOf=divisor)

    def _any(self, depth: int) -> dict[str, Any]:
        return self._pick(({}, {"type": "null"}))

    def _values(self, depth: int) -> dict[str, Any]:
        values = [self._pick((*TEXTS, 1, 2.5, True, None, {"a": 1}, [1], 2**70)) for _ in range(3)]
        return self._pick(({"const": values[0]}, {"enum": values}, {"enum": ["a", 1, 2]}))

    def _ref(self, depth: int) -> dict[str, Any]:
        return {"$ref": self._pick(REFS[1:])} if self._may_refer else {}

    def _object(self, depth: int) -> dict[str, Any]:
        inner = {name: self.schema(depth - 1) for name in "ab"} | {"title": {"type": "null"}}
        named = self._some(**inner, next={"$ref": self._pick(REFS)})
        needed = [x for x in named if self._pick((0, 1))]
        more = self._pick((True, False, {"type": "integer"}))
        given = self._some(required=needed, additionalProperties=more)
        return self._typed("object") | ({"properties": named} if named else {}) | given

    def _list(self, depth: int) -> dict[str, Any]:
        first, one = [self.schema(depth - 1), self.schema(0)], {"items": self.schema(depth - 1)}
        older = {"items": first, "additionalItems": False}
        inner = self._pick(
            (one, {"items": first}, older, {"prefixItems": first}, {"prefixItems": first} | one)
        )
        return self._typed("array") | inner | self._some(minItems=1, maxItems=2.0)

    def allowed(self, schema: dict[str, Any], number: int) -> list[Any]:
        """Make values that obey a schema without its malformed parts, by another library."""
        root = as_read(enforceable(schema, "template"))
        check = Draft202012Validator(root, format_checker=Draft202012Validator.FORMAT_CHECKER)
        found = []
        for value in (self._value(root, root, 4) for _ in range(number)):
            try:
                found += [value] * check.is_valid(value)
            except Exception:  # a ref that leads nowhere, a pattern that Python does not read
                continue
        return found

    def _value(self, node: Any, root: dict[str, Any], depth: int) -> Any:
        if not isinstance(node, dict) or depth < 0:
            return self._pick((None, 1, "a"))
        if "const" in node or "enum" in node:
            return self._pick(node.get("enum", [node.get("const")]))
        if ref := node.get("$ref"):
            name = {"A": "A", "B%20C~1~0": DEFINED[1]}.get(ref.rpartition("/")[2], "")
            where = ref.partition("/")[2].partition("/")[0]
            to = root if ref == "#" else root.get(where, {}).get(name)
            return self._value(to, root, depth - 1)
        joined = {"anyOf", "oneOf", "allOf"} & node.keys()
        if parts := [self._pick(node[x]) for x in sorted(joined - {"allOf"})] + node.get(
            "allOf", []
        ):
            own = {key: x for key, x in node.items() if key not in joined}
            values = [self._value(x, root, depth - 1) for x in (*parts, own)]
            are_objects = all(isinstance(x, dict) for x in values)
            return dict(y for x in values for y in x.items()) if are_objects else self._pick(values)
        return self._of_kind(node, root, depth)

    def _of_kind(self, node: dict[str, Any], root: dict[str, Any], depth: int) -> Any:
        named = node.get("type", ["string", "number", "null"])
        kind = self._pick(named) if isinstance(named, list) else named
        if kind == "object":
            inner = node.get("properties", {})
            names = [x for x in inner if x in node.get("required", []) or self._pick((0, 1))]
            if {"additionalProperties", "patternProperties"} & node.keys():
                names += self._pick(([], ["x"], ["z"]))
            return {x: self._value(inner.get(x, 1), root, depth - 1) for x in names}
        if kind == "array":
            parts = [*node.get("prefixItems", []), *[node.get("items", {})] * 3]
            return [self._value(x, root, depth - 1) for x in parts[: self._pick((0, 1, 2, 3))]]
        whole = (0, 1, 2, 10, 19, -2)
        numbers = {"integer": whole, "number": (*whole, 2.2, 0.5, 9.7, -2.2, 12.4)}
        return self._pick(numbers.get(kind) or {"null": [None], "boolean": [True]}.get(kind, TEXTS))


def as_read(node: Any) -> Any:
    """Write the type of objects and lists that have keywords of theirs and name no type."""
    if isinstance(node, list):
        return [as_read(x) for x in node]
    if not isinstance(node, dict):
        return node
    kinds = [KEYWORDS[x].of for x in node if x in OWN and KEYWORDS[x].of in ("object", "array")]
    typed = {"type": kinds[0]} if kinds and "type" not in node else {}
    return {key: x if key in ("const", "enum") else as_read(x) for key, x in node.items()} | typed


def spellings(value: Any) -> Iterator[str]:
    """Yield a value's JSON with its names in any order: a grammar has one of them."""
    for ordered in itertools.islice(_ordered(value), 300):
        yield json.dumps(ordered, ensure_ascii=False)
        yield json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))


def _ordered(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(_ordered, value))))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for parts in itertools.product(*(list(_ordered(value[x])) for x in names)):
                yield dict(zip(names, parts, strict=True))
    else:
        yield value
