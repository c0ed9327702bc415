"""Keywords of JSON schemas that no grammar knows: left out, named, or refused if strict."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import pytest
from llguidance import LLMatcher, LLTokenizer

from engines.host.grammar import GrammarWish, source_of
from engines.openai.requests import ChatRequest, InvalidRequest, validate_chat
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.keywords import left_out, with_enforceable_formats
from engines.openai.schemas.patterns import in_calls, in_rust, is_plain
from engines.vllm_plugin.grammar.wanted import for_calls

TEXT = {"type": "string"}
CIRCLE = {"$ref": "#"}


def held(schema: dict[str, Any], strict: bool | None = None) -> ChatRequest:
    named = {"name": "n", "schema": schema, "strict": strict}
    return ask(response_format={"type": "json_schema", "json_schema": named})


def offered(schema: dict[str, Any], choice: Any = None, strict: bool | None = None) -> ChatRequest:
    function = {"name": "f", "parameters": schema, "strict": strict}
    return ask(tools=[{"type": "function", "function": function}], tool_choice=choice)


def ask(**fields: Any) -> ChatRequest:
    return validate_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def of(**field: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": field}, "required": ["a"]}


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


UNREAD = ["^\\p{L}+$", "^[\\p{L}\\d]$", "a\\P{Lu}", "(?i)a", "(?i:a)b", "^\\x{41}$", "(^a|b)c"]
# Its texts would have these as they are, so that the arguments were no JSON.
UNREAD += ['^"x"$', r"^[\\]$", "^😀$", r"^\u0022$", r"^[A-Z]:\\", r"^a\nb$", "^a\tb$"]
ANY = r"[\s\S]*"


@pytest.mark.parametrize("pattern", UNREAD)
def test_what_xgrammar_does_not_read_is_left_out_of_calls_at_vllm(pattern: str) -> None:
    """It takes a class of Unicode in another class for its letters, and refuses it alone."""
    schema = of(type="string", pattern=pattern)
    forced = offered(schema, "required").held_schemas
    assert (left_out(forced, "vllm"), left_out(forced, "mlx")) == (["pattern"], [])
    assert left_out(held(schema).held_schemas, "vllm") == []
    strict = offered(schema, strict=True).held_schemas
    with pytest.raises(InvalidRequest, match="'pattern' is not permitted") as refusal:
        left_out(strict, "vllm")
    assert refusal.value.param == "tools[0].function.parameters"
    assert left_out(strict, "mlx") == []
    assert for_calls(schema) == of(type="string")


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^[a-z]$", "^[a-z]$"),
        ("^(?:a)(?<n>b)(?P<m>c)$", "^(?:a)(?<n>b)(?P<m>c)$"),
        ("^https?://", rf"^https?://{ANY}$"),
        ("[0-9]+$", rf"^{ANY}[0-9]+$"),
        ("^a(-b+)?$", "^a(-b+){0,1}$"),
        ("@", rf"^{ANY}@{ANY}$"),
        ("", rf"^{ANY}$"),
        ("^a|b$", rf"^(?:a{ANY}|{ANY}b)$"),
        ("^(a|b)$", "^(a|b)$"),
        (r"\Aa\z", "^a$"),
        ("é", rf"^{ANY}\u00e9{ANY}$"),
        ("^[äb]]$", r"^[\u00e4b]\]$"),
        ('^[^["]$', '^[^["]$'),  # its classes have no quotes and backslashes anyway
    ],
)
def test_xgrammar_is_given_patterns_of_the_whole_text(pattern: str, written: str) -> None:
    schema = of(type="string", pattern=pattern)
    assert left_out(offered(schema, strict=True).held_schemas, "vllm") == []
    assert for_calls(schema) == of(type="string", pattern=written)
    keys = {"type": "object", "patternProperties": {pattern: TEXT}, "additionalProperties": False}
    assert for_calls(keys)["patternProperties"] == {written: TEXT}


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^[^[\\]]+$", r"^[^\[\]]+$"),
        (r"^[\w.[\]]$", r"^[\w.\[\]]$"),
        ("[a&&b~~c]", r"[a&\&b~\~c]"),
        ("[+--]", r"[+-\-]"),
        (r"^\Aa$\z", "^a$"),
    ],
)
def test_llguidance_is_given_classes_without_operators(pattern: str, written: str) -> None:
    schema = of(type="string", pattern=pattern)
    assert left_out(held(schema, strict=True).held_schemas, "vllm") == []
    assert enforceable(schema) == of(type="string", pattern=written)


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        *((x, True) for x in ("(?:a)", "(?<n>a)", "\\\\1", "[\\n]", "[(?=]", "\\(?=", "(?i)a")),
        *((x, True) for x in ("[a&&b]", "^^a$$", "^a|^b$", "(^a|b$)", "a{2}?", "[\\w-.]", "}]")),
        *((x, True) for x in ("\\u{41}-\\x42", "")),
        *((x, False) for x in ("a(?=b)", "\\B", "[^]", "[\\]](x)\\1", "\\k<n>", "a\\Z")),
        *((x, False) for x in ("/^a$/i", "a^b", "(a$)b", "(a$|b)c", "(^a)?b", "$^", "a$?", "^*")),
        *((x, False) for x in ("*a", "a|*b", "(+)", "a{2,1}", "a{,3}", "a{", "{a}", "(a", "a)")),
        *(
            (x, False)
            for x in ("[z-a]", "[a-\\d]", "[\\s-a]", "[\\b]", "(?<n>a)(?<n>b)", "[]", "[a")
        ),
        *((x, False) for x in ("\\cJ", "\\0", "\\h", "\\x4", "\\uD83D\\uDE00", "(?>a)", "(?#c)")),
        ("\\", False),
    ],
)
def test_patterns_that_look_elsewhere(pattern: str, plain: bool) -> None:
    assert is_plain(pattern) == plain
    text = json.dumps({"type": "string", "pattern": in_rust(pattern) if plain else pattern})
    grammar = LLMatcher.grammar_from_json_schema(text)
    assert (
        plain == (not LLMatcher.validate_grammar(grammar, LLTokenizer("byte"))) or pattern == "\\"
    )


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
    described = of(**{"$ref": "#/$defs/a", "description": "x"}) | {"$defs": {"a": TEXT}}
    assert left_out(offered(described, strict=True).held_schemas, "vllm") == []


def test_lengths_are_no_reason_to_refuse_a_strict_call_at_vllm() -> None:
    schema = of(**TEXT, pattern="^a+$", maxLength=2)
    assert left_out(offered(schema, strict=True).held_schemas, "vllm") == ["maxLength"]
    assert for_calls(schema) == of(**TEXT, pattern=in_calls("^a+$"))
    assert left_out(offered(schema, strict=True).held_schemas, "mlx") == []


BYTES = LLTokenizer("byte")
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
        matcher = LLMatcher(BYTES, source_of(GrammarWish([], False, enforceable(schema))).text)
        assert matcher.consume_tokens(list(b'{"a":"x"}')), matcher.get_error()


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
    matcher = LLMatcher(BYTES, source_of(GrammarWish([], False, enforceable(schema))).text)
    assert matcher.consume_tokens(list(b'{"a":"x"}')), matcher.get_error()


NODE = {"type": "object", "properties": {"x": TEXT}}
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
    matcher = LLMatcher(BYTES, source_of(GrammarWish([], False, enforceable(schema))).text)
    assert matcher.consume_tokens(list(f'{{"x":"a","{name}":{{"x":"b"'.encode())), (
        matcher.get_error()
    )


def test_thousands_of_definitions_are_looked_at_once() -> None:
    links = {f"D{i}": of(**{"$ref": f"#/$defs/D{i + 1}"}) for i in range(3000)}
    schema = {"$ref": "#/$defs/D0", "$defs": {**links, "D3000": TEXT}}
    assert enforceable(schema) == schema


def test_bounds_that_older_drafts_exclude_are_written_as_numbers() -> None:
    old = of(type="integer", minimum=0, exclusiveMinimum=True, maximum=9, exclusiveMaximum=False)
    assert for_calls(old) == of(type="integer", exclusiveMinimum=0, maximum=9)
    halves = of(type=["integer", "null"], minimum=0.5)
    assert for_calls(halves) == of(type=["integer", "null"], minimum=1)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": NODE}},
        of(type=["string", "null"], anyOf=[TEXT, {"type": "null"}]),
        of(type="string", oneOf=[{"const": "a"}, {"const": "b"}]),
    ],
)
def test_a_type_that_all_choices_have_is_no_loss_in_calls_at_vllm(schema: dict[str, Any]) -> None:
    assert left_out(offered(schema, strict=True).held_schemas, "vllm") == []


def test_what_stands_beside_choices_is_held_in_calls_at_vllm() -> None:
    either = {**of(**TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert left_out(offered(either, "required").held_schemas, "vllm") == ["anyOf"]
    assert for_calls(either) == {**of(**TEXT), "additionalProperties": True}


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


def test_one_part_of_all_is_written_beside_the_rest_for_calls_at_vllm() -> None:
    schema = of(type="integer", allOf=[{"minimum": 3}])
    assert left_out(offered(schema, strict=True).held_schemas, "vllm") == []
    assert for_calls(schema) == of(type="integer", minimum=3)


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
