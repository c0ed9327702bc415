"""JSON schemas as compilers can enforce them: the rest is left out, named, or refused if strict."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engines.openai.requests import InvalidRequest, validate_tokenize
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.held import left_out, with_enforceable_formats, with_known_keywords
from engines.openai.schemas.refs import Refs
from engines.vllm_plugin.grammar.wanted import for_calls
from tests.unit.engines.openai.asked import BYTES, CIRCLE, TEXT, ask, held, of, offered, reads
from tests.unit.engines.openai.odd_schemas import OddSchemas, spellings

OBJECT = {"type": "object"}
OPEN = {"additionalProperties": True}
ODD_NAMES = ("größe", "\\", '"', "\n", "\x7f")
WHOLE = {"type": "integer"}
UNHELD: list[tuple[dict[str, Any], str]] = [
    ({**OBJECT, "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({**OBJECT, "patternProperties": {"^a": TEXT}}, "patternProperties"),
    ({**OBJECT, "minProperties": 1}, "minProperties"),
    ({**of(**TEXT), "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({**of(**TEXT), "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**of(**TEXT), "if": {}, "then": {"required": ["b"]}}, "if, then"),
    (of(type="array", uniqueItems=True), "uniqueItems"),
    (of(type="array", contains={"const": 1}), "contains"),
    (of(**{"not": {"type": "null"}}), "not"),
    (of(**{"$dynamicRef": "#a"}), "$dynamicRef"),
    (of(type=["string", "null"], format="idn-email"), "format"),
    (of(minimum=-(2**63), maximum=2**53), "minimum"),
    (of(type="number", maximum=0.5), "maximum"),
    (of(type="number", multipleOf=2), "multipleOf"),
    (of(**WHOLE, multipleOf=0.5), "multipleOf"),
    *((of(**WHOLE, enum=[0, x]), "enum") for x in (10**400, 2**53 + 1, 1e20)),
    (of(const=[{"a": 2**64}]), "const"),
    ({**of(**TEXT), "required": ["a", "b"], "additionalProperties": False}, "required"),
    (of(**{"$ref": "#/$defs/a/anyOf/0"}) | {"$defs": {"a": {"anyOf": [TEXT]}}}, "$ref"),
    (of(**{"$ref": "#/$defs/a"}) | {"$defs": {"a": {**TEXT, "$id": "http://e/a"}}}, "$ref"),
    *((of(**{"$ref": x}), "$ref") for x in ("https://x.com/a.json", "#/$defs/gone", "#a", "#/")),
    # Beside a ref that goes round.
    ({**OBJECT, "properties": {"a": {"allOf": [CIRCLE], **OBJECT}}}, "type"),
    ({**OBJECT, "properties": {"a": {**CIRCLE, "enum": [{}]}}}, "$ref"),
]
# Held by llguidance, and not by xgrammar.
UNHELD_IN_CALLS: list[tuple[dict[str, Any], str]] = [
    (of(allOf=[TEXT, {**TEXT, "pattern": "^a"}]), "allOf"),
    ({**of(**TEXT), "$ref": "#/$defs/a", "$defs": {"a": of(**TEXT)}}, "$ref"),
    ({**of(**TEXT), "anyOf": [of(**TEXT), {"type": "null"}]}, "anyOf"),
    (of(**WHOLE, anyOf=[WHOLE, {"const": 1}]), "type"),
    ({**of(**TEXT), "required": ["a", "b"]}, "required"),
    (of(const="x", enum=["x"]), "enum"),
    (of(**TEXT, enum=["a", 1]), "type"),
    (of(**WHOLE, enum=[1, True]), "type"),
    (of(**TEXT, enum=["a", "b"], pattern="^a$"), "pattern"),
    (of(minimum=5), "minimum"),
    (of(**WHOLE, minimum=0, multipleOf=7), "multipleOf"),
    (of(type="array", items=[TEXT, TEXT], maxItems=1), "maxItems"),
    ({**OBJECT, "properties": {"a": False}}, "properties"),
    *(({**OBJECT, "properties": {x: TEXT}, **OPEN}, "additionalProperties") for x in ODD_NAMES),
]


@pytest.mark.parametrize(("schema", "keyword"), UNHELD)
def test_a_keyword_is_left_out_and_named_or_refused_if_strict(schema, keyword):
    names = keyword.split(", ")
    for asked in (held(schema), offered(schema, "required")):
        assert left_out(asked.held_schemas, "mlx") == names
    assert left_out(held(enforceable(schema), strict=True).held_schemas, "mlx") == []
    with pytest.raises(InvalidRequest, match=rf"'n': in context=.*'{re.escape(names[0])}' is not"):
        held(schema, strict=True)
    with pytest.raises(InvalidRequest, match=r"function 'f': in context=") as refusal:
        offered(schema, strict=True)
    assert refusal.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(("schema", "keyword"), UNHELD_IN_CALLS)
def test_what_xgrammar_does_not_hold_is_named_or_refused_in_calls_at_vllm(schema, keyword):
    forced = offered(schema, "required").held_schemas
    assert (left_out(forced, "vllm"), left_out(forced, "mlx")) == ([keyword], [])
    with pytest.raises(InvalidRequest, match="is not permitted with strict"):
        left_out(offered(schema, strict=True).held_schemas, "vllm")


@pytest.mark.parametrize(
    "schema",
    [
        of(**WHOLE, format="int64"),  # of no text: it means nothing
        of(type="array", uniqueItems=False),
        of(const={"not": 1, "uniqueItems": True}),
        {**OBJECT, "properties": {"not": TEXT, "format": TEXT, "if": TEXT}},
        {**of(**TEXT), "x-form": {"allOf": ["a"], "not": 1}, "nullable": True, "minProperties": 0},
        {**of(oneOf=[TEXT, {"const": "a"}]), "$schema": "http://json-schema.org/draft-04/schema#"},
        of(**{"$ref": "#/$defs/a", "description": "x"}) | {"$defs": {"a": TEXT}},
        of(type=["string", "null"], anyOf=[{"const": "a"}, {"type": "null"}], default=10**400),
    ],
)
def test_what_asks_for_nothing_is_no_loss(schema: dict[str, Any]) -> None:
    assert left_out(held(schema, strict=True).held_schemas, "mlx") == []
    assert enforceable(schema)["properties"].keys() == schema["properties"].keys()


def test_what_strict_schemas_may_lose() -> None:
    """Lengths take xgrammar seconds; a pattern says more than the format beside it."""
    lengths = offered(of(**TEXT, minLength=1), strict=True).held_schemas
    assert (left_out(lengths, "vllm"), left_out(lengths, "mlx")) == (["minLength"], [])
    local = {**TEXT, "format": "time", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}
    for asked in (held(of(**local), strict=True), offered(of(**local), strict=True)):
        assert left_out(asked.held_schemas, "vllm") == ["format"]
    assert for_calls(local) == enforceable(local) == {**TEXT, "pattern": local["pattern"]}
    assert enforceable({**local, "pattern": "(?=1)"}) == {**TEXT, "format": "time"}


def test_an_object_of_which_something_is_left_out_stays_open() -> None:
    closed = {"additionalProperties": False}
    for more in (
        {"if": {}},
        {"$ref": "https://e.com/a"},
        {"patternProperties": {"a": {}}, **closed},
    ):
        assert enforceable({**of(**TEXT), **more}) == of(**TEXT) | {"additionalProperties": True}
    assert enforceable({**OBJECT, "properties": 5, **closed}) == OBJECT | {
        "additionalProperties": True
    }
    assert for_calls({"$ref": "#/$defs/gone", "if": {}}) == {}  # not an object only


# Which both compilers hold, which llguidance alone, and which neither.
WHOLE_TEXTS = ("^[a-z]{2,3}$", "^(?:ab|c-[0-9]+)?$", r"^[\w.+-]+@\w+\.com$", "^$")
PARTS = ("a", "^a", "a$", "^a|b$", "", "^.$", r"^\S+$", "^[^a]$")
NOT_PLAIN = ["(?!a)b", "(?<=a)b", r"(a)\1", r"\bfoo\b", "([a-", "a{3,2}", "[z-a]", r"\p{L}"]
NOT_PLAIN += ["(?i)a", 'a"', r"\\", r"\n", "é", "a**", "a+?", "[a&&b]", "[[a]]", "[+--]", "a^b"]
NOT_PLAIN += ["(^a)", "*a", "a{,3}"]
PATTERNS = [(x, True, True) for x in WHOLE_TEXTS] + [(x, True, False) for x in PARTS]
PATTERNS += [(x, False, False) for x in NOT_PLAIN]


@pytest.mark.parametrize(("pattern", "is_held", "is_held_in_calls"), PATTERNS)
def test_plain_patterns_are_held(pattern: str, is_held: bool, is_held_in_calls: bool) -> None:
    schema = of(**TEXT, pattern=pattern)
    assert (enforceable(schema) == schema) == is_held
    called = of(
        **TEXT, **({"pattern": pattern.replace(")?", "){0,1}")} if is_held_in_calls else {})
    )
    assert for_calls(schema) == called | {"x-at": "1"}
    if is_held:
        assert reads(schema, '{"a":"')


def test_no_pattern_takes_long_to_be_read() -> None:
    for part in ("(", "[", "(a|", "a{1", "((a", "(a)*", "[a-z]+", "\\", "(a{1,2}b?)+|"):
        enforceable({**TEXT, "pattern": f"^{part * 4000}!$"})


ANY: dict[str, Any] = {}
NULL = {"type": "null"}
MALFORMED: list[tuple[Any, str, Any]] = [
    *(({"properties": {"a": x}}, "properties", {"properties": {"a": ANY}}) for x in ("bar", 5, [])),
    *(({"type": x}, "type", ANY) for x in ("any", "str", ["string", "x"], [], {}, 5)),
    *(({"enum": x}, "enum", ANY) for x in ("x", [], {})),
    *(({"required": x}, "required", ANY) for x in (True, "a", [1], {})),
    *(({x: "b"}, x, ANY) for x in ("properties", "$defs", "anyOf", "items", "minLength")),
    *(({x: []}, x, ANY) for x in ("properties", "anyOf", "additionalProperties", "pattern")),
    *(({"minItems": x}, "minItems", ANY) for x in (-1, 1.5, True, "1", 2**32)),
    *(({"multipleOf": x}, "multipleOf", ANY) for x in (0, -2, "2", True)),
    ({"$ref": {}}, "$ref", ANY),
    ({"prefixItems": [NULL], "items": [ANY]}, "items", {"prefixItems": [NULL]}),
    ({"anyOf": ["x", of(type=5)]}, "anyOf, type", {"anyOf": [ANY, of()]}),
]


@pytest.mark.parametrize(("schema", "keywords", "shown"), MALFORMED)
def test_what_has_no_form_is_left_out_and_named_or_refused_if_strict(schema, keywords, shown):
    assert enforceable(schema, "template") == shown
    compiled({**OBJECT, **enforceable(schema)})
    for asked in (offered(schema), offered(schema, "required")):
        made, names = known(asked, schema)
        assert names == keywords.split(", ")
        assert made["tools"][0]["function"]["parameters"] == shown
    assert left_out(held(schema).held_schemas, "mlx") == keywords.split(", ")
    for ask_for in (held, lambda *args, **more: offered(*args, "required", **more)):
        with pytest.raises(InvalidRequest, match="which strict does not permit"):
            ask_for(schema, strict=True)


def test_null_asks_for_nothing_and_all_else_is_shown() -> None:
    schema = {
        **of(type=None, enum=None, default=5),
        "anyOf": None,
        "title": 5,
        "x-ui": {"type": "q"},
    }
    shown = {**of(default=5), "title": 5, "x-ui": {"type": "q"}}
    assert known(offered(schema, strict=True), schema)[1] == []
    assert enforceable(schema, "template") == shown
    assert known(offered(shown, strict=True), shown) == ({}, [])
    assert enforceable({"const": None}) == {"const": None}


OLDER: list[tuple[Any, Any]] = [
    ({"items": [TEXT, WHOLE]}, {"prefixItems": [TEXT, WHOLE]}),
    ({"items": [TEXT], "additionalItems": False}, {"prefixItems": [TEXT], "items": False}),
    ({"items": [], "additionalItems": WHOLE}, {"items": WHOLE}),
    ({"prefixItems": [TEXT], "additionalItems": False}, {"prefixItems": [TEXT]}),
    ({"minItems": 2.0, "maxItems": 2}, {"minItems": 2, "maxItems": 2}),
    (
        {"minimum": 0, "exclusiveMinimum": True, "maximum": 9.0},
        {"exclusiveMinimum": 0, "maximum": 9},
    ),
]


@pytest.mark.parametrize(("older", "newer"), OLDER)
def test_older_drafts_are_written_as_compilers_know_them(older: Any, newer: Any) -> None:
    assert json.dumps(enforceable(older), sort_keys=True) == json.dumps(newer, sort_keys=True)
    assert left_out(held(of(**older), strict=True).held_schemas, "vllm") == []


def test_the_refusal_says_where() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        offered(of(anyOf=[{"properties": {"b": "bar"}}]), strict=True)
    assert refusal.value.message == (
        "tools[0].function.parameters: Invalid schema for function 'f': in context=('properties',"
        " 'a', 'anyOf', '0', 'properties', 'b'), 'bar' is not a JSON schema, which strict does"
        " not permit: mend it, or set strict to false"
    )
    with pytest.raises(InvalidRequest, match=r"in context=\('properties', 'a'\), 'type' cannot be"):
        held(of(type="any"), strict=True)


def test_what_is_held_to_no_schema_is_not_looked_at() -> None:
    schema = of(**{"not": {}})
    for choice in (None, "auto", "none"):
        assert offered(schema, choice).held_schemas == []
    assert offered(CIRCLE).held_schemas == offered(schema, "none", strict=True).held_schemas == []
    function = {"name": "f", "parameters": of(type="any"), "strict": True}
    tools = [{"type": "function", "function": function}]
    counted = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    validate_tokenize(counted)
    loose = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    beside = ask(tools=loose, response_format={"type": "json_object"})
    assert [left_out(beside.held_schemas, x) for x in ("mlx", "vllm")] == [["not"], []]


ENDLESS: list[dict[str, Any]] = [
    CIRCLE,
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    of(**{"$ref": "#/$defs/a~1b"}) | {"$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}},
    of(**CIRCLE),
    {"type": "array", "minItems": 1, "items": CIRCLE},
    {"type": "array", "minItems": 1, "prefixItems": [CIRCLE]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    of(anyOf=[CIRCLE, {"type": "array", "items": CIRCLE, "minItems": 1}]),
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_circle_of_refs_gets_a_sentence(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"the \$ref '#.*' leads back to itself") as refusal:
        held(schema)
    assert refusal.value.param == "response_format"
    with pytest.raises(InvalidRequest, match="leads back to itself"):
        offered(schema, "required")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": CIRCLE},
        {"type": "array", "prefixItems": [TEXT], "minItems": 1, "items": CIRCLE},
        {"anyOf": [CIRCLE, TEXT]},
        {**of(**TEXT), "$defs": {"unused": {"$ref": "#/$defs/unused"}}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": TEXT}},
        {"$ref": "#/nowhere/3"},  # is left out
    ],
)
def test_other_refs_are_no_circle(schema: dict[str, Any]) -> None:
    assert len(held(schema).held_schemas) == 1


def test_deep_schemas_and_long_chains_are_written_at_once() -> None:
    links = {f"d{i}": of(**{"$ref": f"#/$defs/d{i + 1}"}) for i in range(4000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, "d4000": TEXT}}
    assert enforceable(schema) == schema and len(held(schema).held_schemas) == 1
    with pytest.raises(InvalidRequest, match="leads back"):
        held({**schema, "$defs": {**links, "d4000": {"$ref": "#/$defs/d9"}}})
    repeated = {"type": ["null"] * 50_000 + ["integer"], "enum": [1] * 5000}
    assert enforceable(repeated, "xgrammar") == repeated | {"x-at": "1"}
    twice: Any = TEXT
    for _ in range(30):
        twice = of(**twice) | {"required": ["a", "a"]}
    assert len(held(twice).held_schemas) == 1
    left: list[Any] = []
    deep: Any = TEXT
    for _ in range(10_000):
        deep = {"items": deep}
    enforceable(deep, "xgrammar", left.append)
    assert left[-1].keyword == "items"


@pytest.mark.parametrize("name", ["A B", "A<B>", "A/B", "A~B", "Größe", "C#", "100%"])
@pytest.mark.parametrize("where", ["$defs", "definitions"])
def test_refs_are_written_as_each_compiler_finds_them(name: str, where: str) -> None:
    step = name.replace("~", "~0").replace("/", "~1")
    for written in (step, quote(step, safe="~")):
        schema = of(**{"$ref": f"#/{where}/{written}"}) | {where: {name: {"const": "x"}}}
        assert left_out(offered(schema, "required").held_schemas, "vllm") == []
        assert for_calls(schema)["properties"]["a"]["$ref"] == f"#/{where}/{step}"
        assert for_calls(schema)[where] == {step: {"const": "x", "x-at": "1"}}
        assert reads(schema, '{"a":"x"}') and not reads(schema, '{"a":"y"}')


@pytest.mark.parametrize(
    "inner",
    [
        {"discriminator": {"propertyName": "kind"}, "oneOf": [CIRCLE, TEXT]},
        {"nullable": True, "allOf": [CIRCLE]},
        {**CIRCLE, "x-order": 1, "minProperties": 0, "default": {}},
    ],
)
def test_a_tree_is_served_whatever_stands_beside_its_ref(inner: dict[str, Any]) -> None:
    schema = {**OBJECT, "properties": {"x": TEXT, "next": inner}}
    assert left_out(held(schema, strict=True).held_schemas, "mlx") == []
    assert reads(schema, '{"x":"a","next":{"x":"b"')


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_an_answer_may_have_all_that_an_odd_schema_allows(chance: Random, odd: bool) -> None:
    maker = OddSchemas(chance, odd=odd)
    schema = maker.root()
    made = enforceable(schema)
    assert enforceable(made) == made
    if Refs(made).endless:
        return
    values = maker.allowed(schema, 8)
    try:
        source = compiled(made)
    except AssertionError as error:  # the client's own keywords contradict each other
        assert "nsatisfiable" in str(error)
        return
    for value in values:
        assert any(takes(source, x) for x in spellings(value)), (schema, value)


def compiled(schema: dict[str, Any]) -> str:
    source = LLMatcher.grammar_from_json_schema(schema, overrides={"coerce_one_of": True})  # type: ignore[arg-type]
    error = LLMatcher(BYTES, source, log_level=0).get_error()
    assert not error, error
    return source


def takes(source: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, source, log_level=0)
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


def known(asked: Any, schema: Any) -> tuple[dict[str, Any], list[str]]:
    function = {"name": "f", "parameters": schema}
    raw = {"tools": [{"type": "function", "function": function}]}
    return with_known_keywords(raw, asked.held_schemas, "mlx")


def test_both_fields_of_answers_are_written() -> None:
    schema = of(**{"not": {}})
    sent = with_enforceable_formats(
        {
            "structured_outputs": {"json": json.dumps(schema)},
            "response_format": {"json_schema": {"schema": schema}},
        }
    )
    assert sent["structured_outputs"]["json"] == of()
    assert sent["response_format"] == {"json_schema": {"schema": of()}}
