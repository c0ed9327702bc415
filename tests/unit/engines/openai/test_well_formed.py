"""What stands in a JSON schema without meaning: left out and named, or refused if strict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engines.openai.requests import InvalidRequest, validate_chat, validate_tokenize
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.keywords import with_known_keywords
from engines.openai.schemas.well_formed import misfits, well_formed

ANY: dict[str, Any] = {}


def of(field: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": field}, "required": ["a"], **more}


NULL = {"type": "null"}
MISFITS: list[tuple[Any, str, Any]] = [
    *((of(x), "properties", of(ANY)) for x in ("bar", 5, [], ["string"])),
    *((of({"type": x}), "type", of(ANY)) for x in ("any", "str", ["string", "x"], [], {}, 5)),
    *((of({"enum": x}), "enum", of(ANY)) for x in ("x", [], {})),
    *(({"required": x}, "required", ANY) for x in (True, "a", [1], {})),
    *(({x: "b"}, x, ANY) for x in ("properties", "$defs", "anyOf", "items", "minLength")),
    *(({x: []}, x, ANY) for x in ("properties", "anyOf", "additionalProperties", "pattern")),
    *(({"minItems": x}, "minItems", ANY) for x in (-1, 1.5, True, "1", 2**32)),
    *(({"multipleOf": x}, "multipleOf", ANY) for x in (0, -2, "2", True)),
    ({"maximum": "1"}, "maximum", ANY),
    ({"format": 5}, "format", ANY),
    ({"$ref": {}}, "$ref", ANY),
    ({"items": ["string", NULL]}, "items", {"prefixItems": [ANY, NULL]}),
    ({"prefixItems": [NULL], "items": [ANY]}, "items", {"prefixItems": [NULL]}),
    ({"anyOf": ["x", of(5)]}, "anyOf, properties", {"anyOf": [ANY, of(ANY)]}),
    ({"$defs": {"a": 1}, "patternProperties": {"b": "c"}}, "$defs, patternProperties", None),
]


@pytest.mark.parametrize(("schema", "keywords", "mended"), MISFITS)
def test_what_has_no_meaning_is_left_out_and_named_or_refused_if_strict(schema, keywords, mended):
    assert sorted({x.keyword for x in misfits(schema)}) == keywords.split(", ")
    assert misfits(well_formed(schema)) == []
    if mended is not None:
        assert well_formed(schema) == mended
    text = json.dumps({"type": "object", **enforceable(schema)})
    grammar = LLMatcher.grammar_from_json_schema(text, overrides={"coerce_one_of": True})  # type: ignore[arg-type]
    assert LLMatcher.validate_grammar(grammar, LLTokenizer("byte")) == ""
    for field in (form(schema), tools(schema), tools(schema) | {"tool_choice": "required"}):
        made, names = known(field)
        assert names == keywords.split(", ")
        assert misfits(schema_in(made)) == []
    for field in (form(schema, strict=True), tools(schema, strict=True)):
        with pytest.raises(InvalidRequest, match="which strict does not permit") as refusal:
            known(field)
        assert refusal.value.param in ("response_format", "tools[0].function.parameters")


WELL_FORMED = [
    of({"type": ["string", "null"], "default": 5, "enum": ["a", None], "title": 5}),
    of(True, additionalProperties=False),
    of({"items": {"type": "string"}, "exclusiveMinimum": -0.5}),
    of({"prefixItems": [{"type": "string"}], "items": False}),
    of({"const": {"type": "any"}, "x-ui": {"type": "field"}, "description": {"properties": 5}}),
    {"properties": {"type": {"type": "string"}, "required": {}, "enum": False}},
]


@pytest.mark.parametrize("schema", WELL_FORMED)
def test_all_else_stays_as_it_is(schema: Any) -> None:
    assert (misfits(schema), well_formed(schema)) == ([], schema)
    assert known(tools(schema, strict=True)) == ({}, [])


def test_null_asks_for_nothing() -> None:
    schema = of({"type": None, "enum": None, "items": None}, anyOf=None)
    assert (misfits(schema), well_formed(schema)) == ([], of(ANY))
    assert well_formed({"properties": {"a": None}}) == {"properties": {"a": ANY}}
    assert known(tools({"properties": {"a": None}})) == (tools({"properties": {"a": ANY}}), [])


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
TUPLES: list[tuple[Any, Any]] = [
    ({"items": [TEXT, WHOLE]}, {"prefixItems": [TEXT, WHOLE]}),
    ({"items": [TEXT], "additionalItems": False}, {"prefixItems": [TEXT], "items": False}),
    ({"items": [of({"items": [TEXT]})]}, {"prefixItems": [of({"prefixItems": [TEXT]})]}),
    ({"items": [], "additionalItems": WHOLE}, {"items": WHOLE}),
    ({"items": [TEXT], "additionalItems": None}, {"prefixItems": [TEXT]}),
    ({"minItems": 2.0, "maxItems": 2}, {"minItems": 2, "maxItems": 2}),
]


@pytest.mark.parametrize(("older", "newer"), TUPLES)
@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_an_older_drafts_tuple_and_whole_fractions_are_written_as_compilers_know_them(
    older: Any, newer: Any, strict: bool | None, engine: str
) -> None:
    for choice in (None, "required"):
        asked = tools(of({"type": "array", **older}), strict)
        made, names = known(asked | {"tool_choice": choice}, engine)
        assert names == []
        assert (made or asked) == tools(of({"type": "array", **newer}), strict)
    made, names = known(form(of({"type": "array", **older}), strict), engine)
    assert (schema_in(made), names) == (of({"type": "array", **newer}), [])
    assert json.dumps(schema_in(made)) == json.dumps(of({"type": "array", **newer}))


def test_refs_into_an_older_drafts_tuple_still_lead_there() -> None:
    """zod writes what it saw before as a path from the root."""
    refs = {"/properties/a/items/0": "/properties/a/prefixItems/0", "": ""}
    refs |= {"/properties/a/additionalItems": "/properties/a/items"}
    refs |= {"/properties/a/items/1/items/0": "/properties/a/prefixItems/1/prefixItems/0"}
    refs |= {"/properties/items/items/0": "/properties/items/prefixItems/0"}
    refs |= {"/properties/c/items": "/properties/c/items", "/x/items/0": "/x/items/0"}
    refs |= {"/$defs/a~1b%25/items/0": "/$defs/a~1b%25/prefixItems/0"}

    def schema(ref: str, items: str, others: str) -> Any:
        inner = {items: [TEXT]}
        named = {"a": {items: [TEXT, inner], others: WHOLE}, "items": inner, "c": {"items": TEXT}}
        more = {"$defs": {"a/b%": inner}, "x": {"items": [TEXT]}}
        return {"properties": {**named, "b": {"items": {"$ref": f"#{ref}"}}}, **more}

    for before, after in refs.items():
        older = schema(before, "items", "additionalItems")
        assert well_formed(older) == schema(after, "prefixItems", "items")


def test_the_refusal_says_where() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        known(tools(of({"anyOf": [of("bar")]}), strict=True))
    assert refusal.value.message == (
        "tools[0].function.parameters: Invalid schema for function 'f': in context=('properties',"
        " 'a', 'anyOf', '0', 'properties', 'a'), 'bar' is not a JSON schema, which strict does not"
        " permit: mend it, or set strict to false"
    )
    with pytest.raises(InvalidRequest, match=r"in context=\('properties', 'a'\), 'type' cannot be"):
        known(tools(of({"type": "any"}), strict=True))


def test_a_prompt_that_is_only_counted_is_held_to_nothing() -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for choice in ("auto", "required"):
        validate_tokenize({**asked, **tools(of("bar"), strict=True), "tool_choice": choice})


def test_beside_a_format_mlx_holds_all_calls_that_may_come_instead() -> None:
    field = form(of({"type": "string"})) | tools(of({"not": {}}))
    assert known(field)[1] == ["not"]
    assert known({**field, "tool_choice": "none"})[1] == []
    assert known(field, "vllm")[1] == []
    assert known(tools(of({"not": {}})))[1] == []


def form(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    named = {"name": "n", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def tools(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema, "strict": strict}
    return {"tools": [{"type": "function", "function": function}]}


def known(fields: dict[str, Any], engine: str = "mlx") -> tuple[dict[str, Any], list[str]]:
    raw = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return with_known_keywords(raw, validate_chat(raw).held_schemas, engine)


def schema_in(made: dict[str, Any]) -> Any:
    if "tools" in made:
        return made["tools"][0]["function"]["parameters"]
    return made["response_format"]["json_schema"]["schema"]
