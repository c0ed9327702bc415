"""The work of a grammar's compiler is counted before it gets the schema."""

from __future__ import annotations

from typing import Any

import pytest

from engines.openai.errors import InvalidRequest
from engines.openai.requests import (
    ChatRequest,
    CompletionRequest,
    validate_chat,
    validate_completion,
)
from engines.openai.schemas.schema_count import pattern_chars


def an_object(num_properties: int, *, required: bool = False) -> dict[str, Any]:
    names = [f"property_{i}" for i in range(num_properties)]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: {"type": "string", "description": "of a thing"} for name in names},
    }
    return {**schema, "required": names} if required else schema


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def asking(schema: Any = None, tools: list[Any] | None = None, **fields: Any) -> ChatRequest:
    raw = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    if schema is not None:
        raw["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if tools is not None:
        raw["tools"] = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": x}}
            for i, x in enumerate(tools)
        ]
    return validate_chat(raw)


@pytest.mark.parametrize(
    "schema",
    [
        *(an_object(10_000), an_object(600), an_object(5001, required=True)),
        {"anyOf": [an_object(300) for _ in range(4)]},
        nested(100),
        {"enum": [f"value {i}" for i in range(6000)]},
        {"const": "x" * (1 << 20)},
        *({"multipleOf": x} for x in (99_999_989, 0.99999)),
        {"allOf": [{"type": "string", "pattern": f"a{i}.*b"} for i in range(400)]},
        {"pattern": "^((a{1,100}){1,100}){1,100}$"},
        {"patternProperties": {"^.{1,20000}$": {"type": "string"}}},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_schema_of_too_much_work_is_refused(schema: Any) -> None:
    for raw, param in (({"schema": schema}, "response_format"), ({"tools": [{}, schema]}, "")):
        with pytest.raises(InvalidRequest) as refusal:
            asking(**raw)
        assert refusal.value.status == 400
        assert refusal.value.param == (param or "tools[1].function.parameters")


def test_all_functions_count_together() -> None:
    assert asking(tools=[an_object(39)] * 128).tools
    with pytest.raises(InvalidRequest, match="too many optional properties"):
        asking(tools=[an_object(200)] * 128)
    with pytest.raises(InvalidRequest, match="properties, more than 5000"):
        asking(tools=[an_object(51, required=True)] * 128)


def test_schemas_that_agents_send_are_taken() -> None:
    """Some dozens of functions with nested objects, lists of choices, patterns and bounds."""
    parameters = an_object(12) | {"required": ["property_0"]}
    parameters["properties"] |= {
        "todos": {"type": "array", "maxItems": 500, "items": an_object(6, required=True)},
        "mode": {"type": "string", "enum": [f"mode {i}" for i in range(40)]},
        "id": {"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
        "title": {"type": "string", "minLength": 1, "maxLength": 256},
        "at": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?Z?$"},
        "step": {"type": "number", "multipleOf": 0.25},
    }
    request = asking(tools=[parameters] * 64)
    request.count_schemas().check_lengths()
    asking(nested(25))


def test_lengths_of_texts_count_for_vllm_only() -> None:
    lengths = {f"p{i}": {"type": "string", "maxLength": 100 + i} for i in range(9)}
    request = asking({"type": "object", "properties": lengths})
    with pytest.raises(InvalidRequest, match="9 different lengths") as refused:
        request.count_schemas().check_lengths()
    assert refused.value.param == "response_format"
    asking(tools=[{"type": "object", "properties": lengths}]).count_schemas().check_lengths()
    short = {f"p{i}": {"type": "string", "maxLength": 20 + i} for i in range(9)}
    asking({"type": "object", "properties": short}).count_schemas().check_lengths()


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"json": an_object(600)},
        {"json": '{"enum": ["' + '", "'.join(map(str, range(6000))) + '"]}'},
        {"choice": [str(i) for i in range(6000)]},
        {"structural_tag": {"structures": [{"begin": "<a>", "schema": an_object(600)}]}},
        {"grammar": "x" * (1 << 20)},
        {"json": "{"},
    ],
    ids=lambda wanted: str(wanted)[:40],
)
def test_vllms_own_field_counts_as_well(wanted: Any) -> None:
    def text(**fields: Any) -> CompletionRequest:
        return validate_completion({"model": "m", "prompt": "x", **fields})

    for ask in (asking, text):
        with pytest.raises(InvalidRequest) as refusal:
            ask(structured_outputs=wanted)
        assert str(refusal.value.param).startswith("structured_outputs.")
        ask(structured_outputs={"regex": "[a-z]{1,9}"})


@pytest.mark.parametrize(
    ("pattern", "number"),
    [
        *(("", 0), ("abc", 3), ("[a-z]{3}", 3), (r"\d{2,4}\.", 5), ("(ab|c){10}", 30)),
        *(("((a{1,10}){1,10}){1,10}", 1000), (r"[\]{9}]{2}", 2), ("a{,5}", 5), (")){3}(", 4)),
    ],
)
def test_characters_of_a_pattern(pattern: str, number: int) -> None:
    assert pattern_chars(pattern) == number
