"""``oneOf`` is the same as ``anyOf`` where its branches exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from engines.openai.schemas.one_of import Branches

TEXT, NUMBER = {"type": "string"}, {"type": "number"}


def tagged(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"const": value}, "v": TEXT},
        "required": [name],
        **more,
    }


def closed(*names: str) -> dict[str, Any]:
    named = {"properties": dict.fromkeys(names, TEXT), "required": list(names)}
    return {"type": "object", **named, "additionalProperties": False}


@pytest.mark.parametrize(
    "branches",
    [
        [TEXT, NUMBER],
        [TEXT, {"type": ["number", "null"]}, {"const": True}],
        [{"const": 1}, {"const": 2}, {"enum": [3, "1"]}],
        [{"const": x} for x in range(40)],
        [tagged("kind", "a"), tagged("kind", "b"), {"type": "null"}],
        [tagged("kind", x) for x in range(40)],
        [closed("a"), closed("b")],
        [closed("a"), tagged("kind", "a")],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        [{"allOf": [tagged("kind", "a"), {"maxProperties": 3}]}, tagged("kind", "b")],
        *([TEXT, False], [TEXT]),
    ],
)
def test_branches_that_exclude_each_other(branches: list[Any]) -> None:
    root = {"oneOf": branches, "$defs": {x: tagged("kind", x) for x in "ab"}}
    assert Branches(root).exclude_each_other(root)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, NUMBER],
        *([TEXT, x] for x in ({}, True)),
        [{"const": 1}, {"const": 1.0}],
        [{"const": x % 39} for x in range(40)],
        [{"const": "a"}, TEXT],
        [tagged("kind", "a"), tagged("kind", "a")],
        [tagged("kind", "a", required=[]), tagged("kind", "b")],
        [tagged("kind", x, type=["object", "string"]) for x in "ab"],
        [*(tagged("kind", x) for x in range(40)), {"type": "object"}],
        [closed("a"), {**closed("a"), "additionalProperties": True}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"$ref": "#/oneOf/0"}, TEXT],
        [{"$ref": "#/missing"}, {"$ref": 5}],
        [{"minimum": 3}, {"maximum": 2}],
    ],
)
def test_branches_that_may_hold_at_once(branches: list[Any]) -> None:
    root = {"oneOf": branches}
    assert not Branches(root).exclude_each_other(root)


def test_what_stands_beside_them_holds_for_all() -> None:
    branches = [{k: x for k, x in tagged("kind", y).items() if k != "type"} for y in "ab"]
    assert not Branches({}).exclude_each_other({"oneOf": branches})
    assert Branches({}).exclude_each_other({"type": "object", "oneOf": branches})
