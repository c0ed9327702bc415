"""Which grammars vLLM would compile for a request, and which of them are tried."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.vllm_plugin.grammar.wanted import for_calls, wanted_by

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 500}}}


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": SCHEMA, **more}}


def asked(**fields: Any) -> list[tuple[str, str]]:
    body = json.dumps({"model": "m", "messages": [], **fields}).encode()
    return [(x.kind, x.param) for x in wanted_by(body)]


def test_a_request_that_compiles_nothing_wants_nothing() -> None:
    assert asked() == []
    assert asked(tools=[tool()]) == asked(tools=[tool()], tool_choice="auto") == []
    assert asked(tools=[tool(strict=True)], tool_choice="none") == []
    assert asked(response_format={"type": "text"}) == []
    assert asked(response_format={"type": "json_object"}) == []
    assert wanted_by(b"no JSON") == wanted_by(b'{"tools": 7}') == []


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
GRAMMARS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool()], "tool_choice": "required"}, "tag", "tools"),
    ({"tools": [tool(strict=True)]}, "tag", "tools"),
    ({"response_format": FORMAT}, "json", "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "tag", "response_format"),
    ({"structured_outputs": {"json": SCHEMA}}, "json", "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", '"']}}, "grammar", "structured_outputs.choice"),
]


@pytest.mark.parametrize(("fields", "kind", "param"), GRAMMARS)
def test_each_field_that_is_a_grammar(fields: dict[str, Any], kind: str, param: str) -> None:
    assert asked(**fields) == [(kind, param)]


def test_calls_are_held_to_everything_but_lengths() -> None:
    body = json.dumps({"tools": [tool()], "tool_choice": "required"}).encode()
    tried = json.loads(wanted_by(body)[0].text)["format"]["tags"][0]["content"]["json_schema"]
    made = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert tried == made | {"x-at": "1"}  # xgrammar would take two schemas for one
    named = {"properties": {"maxLength": {"type": "integer"}}, "minLength": 3}
    made = {"properties": {"maxLength": {"type": "integer"}}}
    assert for_calls(named) == made | {"x-at": "1"}
