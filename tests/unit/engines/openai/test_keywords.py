"""Keywords of JSON schemas that no grammar knows: left out, named, or refused if strict."""

from __future__ import annotations

import re
from typing import Any

import pytest
from llguidance import LLMatcher

from engines.host.grammar import GrammarWish, source_of
from engines.openai.requests import InvalidRequest
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.keywords import left_out, with_enforceable_formats
from engines.openai.schemas.patterns import in_calls
from engines.vllm_plugin.grammar.wanted import for_calls
from tests.unit.engines.openai.asked import CIRCLE, TEXT, held, of, offered

NOT_KNOWN = ("^(?!\\.)a+$", "(?<=a)b", "(a)\\1", "\\bfoo\\b", "([a-")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (
            {"type": "object", "propertyNames": {"pattern": "a"}, "minProperties": 1},
            "propertyNames",
        ),
        (of(type="array", uniqueItems=True), "uniqueItems"),
        (of(type="array", contains={"const": 1}), "contains"),
        (of(**{"not": {"type": "null"}}), "not"),
        ({**of(**TEXT), "if": {}, "then": {"required": ["b"]}}, "if, then"),
        ({**of(**TEXT), "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**of(**TEXT), "anyOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        (of(type="array", prefixItems=[{}], unevaluatedItems=False), "unevaluatedItems"),
        *((of(**TEXT, pattern=x), "pattern") for x in NOT_KNOWN),
        (of(type=["string", "null"], format="idn-email"), "format"),
        ({"type": "object", "patternProperties": {"([": TEXT}}, "patternProperties"),
        (of(type="integer", minimum=-(2**63), maximum=2**64 - 1), "minimum"),
        (of(type="integer", minimum=0, maximum=2**64), "maximum"),
        (of(type="number", maximum=3.4e38), "maximum"),
        (of(exclusiveMinimum=-(10**400)), "exclusiveMinimum"),
        (of(minimum=1e30), "minimum"),
        (of(multipleOf=1e-18), "multipleOf"),
        ({"type": "object", "patternProperties": {"^(?!a)": TEXT}}, "patternProperties"),
        ({"anyOf": [of(**TEXT), {"items": {"not": {}}}]}, "not"),
        (of(oneOf=[{"type": "integer"}, {"type": "number"}]), "oneOf"),
        ({**of(**TEXT), "oneOf": [{"required": ["b"]}, {"required": ["c"]}]}, "oneOf"),
        ({"$ref": "#/components/x", "components": {"x": {"not": {}}}}, "not"),
        (
            {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "minProperties": 2},
            "minProperties",
        ),
        ({**of(**TEXT), "required": [], "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": TEXT}, "maxProperties": 0}, "maxProperties"),
        *((of(**{"$ref": x}), "$ref") for x in ("https://x.com/a.json", "#/$defs/gone", "#gone")),
        (of(enum=[10**400]), "enum"),
        (of(const=10**29 + 1), "const"),  # no double is that number
        ({"type": "object", "patternProperties": {"^a": TEXT, "b$": {}}}, "patternProperties"),
        ({"type": "object", "patternProperties": {"^a": TEXT, "^ab": {}}}, "patternProperties"),
        (of(**{"$ref": "#/$defs/a/oneOf/0"}) | {"$defs": {"a": {"oneOf": [TEXT]}}}, "$ref"),
        (of(**{"$ref": "#/"}), "$ref"),
        ({"type": "object", "properties": {"a": {"$ref": "#", "type": "object"}}}, "type"),
        ({**of(**TEXT), "minProperties": 2}, "minProperties"),
        ({"anyOf": [of(**TEXT)], "minProperties": 2}, "minProperties"),
        (of(type="number", exclusiveMinimum=0, maximum=0.5), "exclusiveMinimum"),
        ({"type": "object", "properties": {"a": {"type": "object", "allOf": [CIRCLE]}}}, "type"),
    ],
)
def test_a_keyword_is_left_out_and_named_or_refused_if_strict(schema, keyword):
    names = keyword.split(", ")
    assert left_out(held(schema).held_schemas, "mlx") == names
    assert left_out(offered(schema, "required").held_schemas, "mlx") == names
    named = {"type": "function", "function": {"name": "f"}}
    assert left_out(offered(schema, named).held_schemas, "mlx") == names
    assert left_out(held(enforceable(schema), strict=True).held_schemas, "mlx") == []
    with pytest.raises(InvalidRequest, match=rf"'n': in context=.*'{re.escape(names[0])}'"):
        held(schema, strict=True)
    with pytest.raises(
        InvalidRequest, match=rf"function 'f': in context=.*'{re.escape(names[0])}'"
    ) as refusal:
        offered(schema, strict=True)
    assert refusal.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    "schema",
    [
        of(type="string", format="email", pattern="^[a-z]+@[a-z.]+$"),
        of(type="integer", format="int64"),  # of no text: it means nothing
        of(type="array", uniqueItems=False),
        of(const={"not": 1, "uniqueItems": True}),
        {"type": "object", "properties": {"not": TEXT, "format": TEXT, "if": TEXT}},
        {**of(**TEXT), "$schema": "https://example.com/mine"},
        {**of(const=1), "$schema": "http://json-schema.org/draft-04/schema#"},
        {**of(**TEXT), "unevaluatedProperties": False},
    ],
)
def test_all_else_stays(schema: dict[str, Any]) -> None:
    assert left_out(held(schema, strict=True).held_schemas, "mlx") == []
    made = enforceable(schema)
    assert made["properties"].keys() == schema["properties"].keys()
    assert made.get("additionalProperties") == schema.get("unevaluatedProperties")
    assert "$schema" not in made


def test_what_is_held_to_no_schema_is_not_looked_at() -> None:
    schema = of(**{"not": {}})
    for choice in (None, "auto", "none"):
        assert offered(schema, choice).held_schemas == []
    assert offered(schema, "none", strict=True).held_schemas == []
    assert offered({"$ref": "#"}).held_schemas == []


@pytest.mark.parametrize("engine", ["mlx", "vllm"])
@pytest.mark.parametrize("kind", ["time", "date-time"])
def test_a_time_without_an_offset_by_its_pattern_is_held_to_that(engine: str, kind: str) -> None:
    local = {"type": "string", "format": kind, "pattern": "[0-2][0-9]:[0-5][0-9]$"}
    for asked in (held(of(**local)), offered(of(**local), "required")):
        assert left_out(asked.held_schemas, engine) == ["format"]
    assert enforceable(local) == {**TEXT, "pattern": local["pattern"]}
    for asked in (held(of(**local), strict=True), offered(of(**local), strict=True)):
        assert left_out(asked.held_schemas, engine) == ["format"]


def test_other_formats_and_patterns_are_held_together() -> None:
    for both in (
        {"type": "string", "format": "date-time", "pattern": "^[^+]*(?:Z|)$"},
        {"type": "string", "format": "date", "pattern": "^20"},
        {"type": "integer", "format": "time", "pattern": "^20"},
    ):
        assert left_out(held(of(**both), strict=True).held_schemas, "mlx") == []
        assert enforceable(both) == both
    for values, names in (({"enum": ["12:00Z", "12:00"]}, []), ({"const": "12:00"}, ["format"])):
        asked = held(of(type="string", format="time", **values))
        assert left_out(asked.held_schemas, "mlx") == names
    looking = {"type": "string", "format": "time", "pattern": "(?=1)"}
    assert left_out(held(of(**looking)).held_schemas, "mlx") == ["pattern"]
    assert enforceable(looking) == {"type": "string", "format": "time"}


def test_an_object_whose_condition_is_left_out_stays_open() -> None:
    made = enforceable({**of(**TEXT), "if": {}, "then": {"properties": {"b": TEXT}}})
    assert made["additionalProperties"] is True
    by_pattern = {"type": "object", "patternProperties": {"^(?!a)": TEXT, "^b": TEXT}}
    made = enforceable({**by_pattern, "additionalProperties": False})
    assert made["patternProperties"] == {"^b": TEXT}
    assert made["additionalProperties"] is True


def test_additional_items_stay_beside_a_list_of_items_only() -> None:
    """Where they mean nothing, llguidance would ignore ``prefixItems`` for them."""
    rows = {"type": "array", "prefixItems": [TEXT], "additionalItems": False}
    assert enforceable(rows) == {"type": "array", "prefixItems": [TEXT]}
    listed = {"type": "array", "items": [TEXT], "additionalItems": False}
    assert enforceable(listed) == {"type": "array", "prefixItems": [TEXT], "items": False}
    assert enforceable({"components": {"a": listed}}) == {"components": {"a": listed}}


@pytest.mark.parametrize(
    "schema",
    [
        {**of(**TEXT), "minProperties": 1},  # it has one anyway
        {**of(**TEXT), "required": [], "additionalProperties": False, "minProperties": 1},
        {**of(**TEXT), "required": [], "additionalProperties": False, "maxProperties": 1},
        {**of(**TEXT), "required": [], "minProperties": 0},
        {**of(**TEXT), "maxProperties": 5},
    ],
)
def test_bounds_on_the_number_of_properties_that_are_kept(schema: dict[str, Any]) -> None:
    assert left_out(held(schema, strict=True).held_schemas, "mlx") == []
    wish = GrammarWish([], False, enforceable(schema))
    assert not LLMatcher.validate_grammar(source_of(wish).text)


def test_branches_that_exclude_each_other_are_any_of_them() -> None:
    """vLLM's own check of a format refuses ``oneOf`` beside ``multipleOf``."""
    kinds = [of(const=1), of(const=2)]
    schema = {"type": "object", "properties": {"k": {"oneOf": kinds}, "n": {"multipleOf": 2}}}
    assert left_out(held(schema, strict=True).held_schemas, "vllm") == []
    assert enforceable(schema)["properties"]["k"] == {"anyOf": kinds}


def test_no_values_of_unread_keywords_break_it() -> None:
    odd = {"oneOf": 5, "type": [{}], "required": {}, "const": [[]]}
    schema = {"components": {"x": odd, "oneOf": odd, "anyOf": [odd]}, "oneOf": [{}, {}]}
    assert left_out(held(schema).held_schemas, "mlx") == ["oneOf"]
    assert enforceable(schema)["components"] == schema["components"]


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (of(allOf=[TEXT, {**TEXT, "pattern": "^a"}]), "allOf"),
        ({**of(**TEXT), "allOf": [{"properties": {"b": TEXT}, "required": ["b"]}]}, "allOf"),
        ({**of(**TEXT), "$ref": "#/$defs/a", "$defs": {"a": of(**TEXT)}}, "$ref"),
        ({**of(**TEXT), "anyOf": [of(**TEXT), {"type": "null"}]}, "anyOf"),
        ({**of(**TEXT), "required": ["a", "b"], "additionalProperties": True}, "required"),
        (of(type="number", multipleOf=0.5), "multipleOf"),
        (of(const="x", enum=["y"]), "enum"),
        (of(**TEXT, enum=["a", 1]), "type"),
        (of(type="integer", enum=[1, True]), "type"),
        (of(**TEXT, enum=["a", "b"], pattern="^a$"), "pattern"),
        (of(**{"$ref": "#/$defs/a", "anyOf": [{}]}) | {"$defs": {"a": TEXT}}, "$ref"),
        (of(**{"$ref": "#a"}) | {"$defs": {"a": {**TEXT, "$anchor": "a"}}}, "$ref"),
        (of(**TEXT, format="date", pattern="^2"), "pattern"),
        (of(minimum=5), "minimum"),
        (of(pattern="^a$"), "pattern"),
        (of(type="integer", maximum=2**64 - 1), "maximum"),  # it refuses this one
        (of(type="integer", minimum=0, multipleOf=7), "multipleOf"),
        (of(type="integer", anyOf=[{"type": "integer"}, TEXT]), "type"),
        (
            of(**{"$ref": "#/$defs/a", "type": "integer", "minimum": 5}) | {"$defs": {"a": {}}},
            "$ref",
        ),
        (of(**{"$ref": "#/$defs/a/anyOf/0"}) | {"$defs": {"a": {"anyOf": [TEXT]}}}, "$ref"),
        (of(**{"$ref": "#/$defs/a"}) | {"$defs": {"a": {**TEXT, "$id": "http://e/a"}}}, "$ref"),
        ({**of(**TEXT), "patternProperties": {"^k": TEXT}}, "patternProperties"),
        ({"type": "object", "patternProperties": {"^k": {}, "^l": TEXT}}, "patternProperties"),
    ],
)
def test_what_xgrammar_ignores_is_named_or_refused_in_calls_at_vllm(schema, keyword):
    """Measured with xgrammar 0.2.8: it takes values that break these."""
    assert left_out(offered(schema, "required").held_schemas, "vllm") == [keyword]
    assert left_out(offered(schema, "required").held_schemas, "mlx") == []
    with pytest.raises(InvalidRequest, match="is not permitted with strict"):
        left_out(offered(schema, strict=True).held_schemas, "vllm")


@pytest.mark.parametrize(
    "beside",
    [
        {"type": "object", "patternProperties": True},
        {"properties": {}, "patternProperties": 1},
        {"patternProperties": None},
        {"prefixItems": 1, "minItems": 2},
        {"allOf": ["a", "b"], "patternProperties": {"^z": TEXT}},
        {"allOf": [{"allOf": 5}, {}], "patternProperties": {"^z": TEXT}},
        {"type": "integer", "multipleOf": 2, "anyOf": 3, "allOf": 5, "patternProperties": {}},
        {"format": "time", "const": "1", "pattern": 5},
    ],
)
@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_keywords_of_vendors_may_look_like_schemas(beside: dict[str, Any], engine: str) -> None:
    schema = {**of(**TEXT), "x-form": beside, "$id": "http://[bad"}
    for asked in (held(schema), offered(schema, "required")):
        left_out(asked.held_schemas, engine)
    sent = with_enforceable_formats({"structured_outputs": {"json": schema}}, engine)
    wish = GrammarWish([], False, sent["structured_outputs"]["json"])
    assert not LLMatcher.validate_grammar(source_of(wish).text)


def test_an_object_whose_ref_is_left_out_stays_open() -> None:
    schema = {**of(**TEXT), "$ref": "https://example.com/more.json"}
    assert enforceable(schema)["additionalProperties"] is True
    assert for_calls({"$ref": "#/$defs/gone", "if": {}}) == {}  # not an object only


def test_numbers_that_vllms_processes_cannot_send_are_written_with_an_exponent() -> None:
    schema = of(enum=[2**70, [-(2**64)], 7], default=10**400, examples=[2**99])
    assert enforceable(schema)["properties"]["a"] == {"enum": [float(2**70), [-float(2**64)], 7]}


@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_a_closed_object_cannot_need_a_property_that_it_excludes(engine: str) -> None:
    schema = {**of(**TEXT), "required": ["a", "b"], "additionalProperties": False}
    assert left_out(held(schema).held_schemas, engine) == ["required"]
    assert enforceable(schema)["required"] == ["a"]
    for open_one in (
        {**schema, "additionalProperties": TEXT},
        {**schema, "patternProperties": {"^b": TEXT}},
        {**schema, "required": ["a"]},
    ):
        assert left_out(held(open_one).held_schemas, engine) == []
        assert enforceable(open_one)["required"] == open_one["required"]


NODE = {"type": "object", "properties": {"x": TEXT}}
EITHER = {**of(**TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
# A schema, what is left out of calls at vLLM though they are strict, and what is made of it.
CALLS: list[tuple[dict[str, Any], list[str], dict[str, Any] | None]] = [
    (of(**TEXT, pattern="^a+$", maxLength=2), ["maxLength"], of(**TEXT, pattern=in_calls("^a+$"))),
    (of(type="integer", allOf=[{"minimum": 3}]), [], of(type="integer", minimum=3)),
    # A type that all choices have is no loss.
    ({"type": "object", "anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": NODE}}, [], None),
    (of(type=["string", "null"], anyOf=[TEXT, {"type": "null"}]), [], None),
    (of(type="string", oneOf=[{"const": "a"}, {"const": "b"}]), [], None),
    (of(**{"$ref": "#/$defs/a", "description": "x"}) | {"$defs": {"a": TEXT}}, [], None),
    # Bounds that older drafts exclude are written as numbers.
    (
        of(type="integer", minimum=0, exclusiveMinimum=True, maximum=9, exclusiveMaximum=False),
        [],
        of(type="integer", exclusiveMinimum=0, maximum=9),
    ),
    (of(type=["integer", "null"], minimum=0.5), [], of(type=["integer", "null"], minimum=1)),
]


@pytest.mark.parametrize(("schema", "names", "made"), CALLS)
def test_what_is_held_in_strict_calls_at_vllm(schema, names, made) -> None:
    strict = offered(schema, strict=True).held_schemas
    assert (left_out(strict, "vllm"), left_out(strict, "mlx")) == (names, [])
    if made is not None:
        assert for_calls(schema) == made


def test_what_stands_beside_choices_is_held_in_calls_at_vllm() -> None:
    assert left_out(offered(EITHER, "required").held_schemas, "vllm") == ["anyOf"]
    assert for_calls(EITHER) == {**of(**TEXT), "additionalProperties": True}
