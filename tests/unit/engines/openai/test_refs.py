"""Refs inside JSON schemas: followed, written as each compiler finds them, or refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from engines.openai.requests import InvalidRequest
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.keywords import left_out
from engines.vllm_plugin.grammar.wanted import for_calls
from tests.unit.engines.openai.asked import CIRCLE, TEXT, held, of, offered, reads


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        of(**{"$ref": "#/$defs/a~1b"}) | {"$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}},
        of(**{"$ref": "#A"}) | {"$defs": {"A": {"$anchor": "A", "$ref": "#A"}}},
        of(**{"$ref": "#"}),
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
def test_a_circle_of_refs_gets_a_sentence(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"the \$ref '#.*' leads back to itself") as refusal:
        held(schema)
    assert refusal.value.param == "response_format"
    with pytest.raises(InvalidRequest, match="leads back to itself"):
        offered(schema, "required")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, TEXT]},
        {**of(**TEXT), "$defs": {"unused": {"$ref": "#/$defs/unused"}}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": TEXT}},
        {"$ref": "#/nowhere/3"},  # is left out
    ],
)
def test_other_refs_are_no_circle(schema: dict[str, Any]) -> None:
    assert len(held(schema).held_schemas) == 1


def test_long_chains_of_refs_are_followed() -> None:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, "d4000": TEXT}}
    assert len(held(schema).held_schemas) == 1
    with pytest.raises(InvalidRequest, match="leads back"):
        held({**schema, "$defs": {**links, "d4000": {"$ref": "#/$defs/d9"}}})


NAMES = ("A B", "A<B>", "A/B", "A~B", "Größe", "C#", "100%")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["$defs", "definitions"])
def test_refs_are_written_as_each_compiler_finds_them(name: str, where: str) -> None:
    step = name.replace("~", "~0").replace("/", "~1")
    for written in (step, quote(step, safe="~")):
        schema = of(**{"$ref": f"#/{where}/{written}"}) | {where: {name: {"const": "x"}}}
        assert left_out(offered(schema, "required").held_schemas, "vllm") == []
        assert for_calls(schema)["properties"]["a"]["$ref"] == f"#/{where}/{step}"
        assert for_calls(schema)[where] == {step: {"const": "x"}}
        assert reads(schema, '{"a":"x"}')


@pytest.mark.parametrize(
    ("ref", "root"),
    [
        ("#a", {}),
        ("https://example.com/own.json#/$defs/A", {"$id": "https://example.com/own.json"}),
        ("https://example.com/a.json", {"$id": "https://example.com/own.json"}),
    ],
)
def test_addresses_inside_a_schema_are_followed(ref: str, root: dict[str, Any]) -> None:
    inner = {"const": "x", "$anchor": "a", **({"$id": "a.json"} if "a.json" in ref else {})}
    schema = root | of(**{"$ref": ref}) | {"$defs": {"A": inner}}
    assert left_out(held(schema, strict=True).held_schemas, "vllm") == []
    assert reads(schema, '{"a":"x"}')


MEANINGLESS = [
    {"discriminator": {"propertyName": "kind"}, "oneOf": [CIRCLE, TEXT]},
    {"nullable": True, "allOf": [CIRCLE]},
    {"deprecated": True, "anyOf": [CIRCLE, {"type": "null"}]},
    {**CIRCLE, "x-order": 1, "minProperties": 0},
]


@pytest.mark.parametrize("inner", MEANINGLESS)
@pytest.mark.parametrize("name", ["next", "default"])
def test_a_tree_is_served_whatever_stands_beside_its_ref(inner: dict[str, Any], name: str) -> None:
    schema = {"type": "object", "properties": {"x": TEXT, name: inner}}
    assert left_out(held(schema, strict=True).held_schemas, "mlx") == []
    assert reads(schema, f'{{"x":"a","{name}":{{"x":"b"')


def test_thousands_of_definitions_are_looked_at_once() -> None:
    links = {f"D{i}": of(**{"$ref": f"#/$defs/D{i + 1}"}) for i in range(3000)}
    schema = {"$ref": "#/$defs/D0", "$defs": {**links, "D3000": TEXT}}
    assert enforceable(schema) == schema
