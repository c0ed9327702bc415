"""Tools whose properties have no schema: served and named in a header, in each dialect."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer, json_answer

SCHEMA = {"type": "object", "properties": {"a": "bar", "b": {"type": "any"}}, "required": ["a"]}
MENDED = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(strict: bool, choice: str) -> dict[str, Any]:
    function = {"name": "f", "parameters": SCHEMA, "strict": strict}
    tools = [{"type": "function", "function": function}]
    return {"messages": MESSAGES, "tools": tools, "tool_choice": choice}


def response(strict: bool, choice: str) -> dict[str, Any]:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": strict}
    return {"input": "hi", "tools": [tool], "tool_choice": choice}


def message(strict: bool, choice: str) -> dict[str, Any]:
    chosen = {"type": "any" if choice == "required" else choice}
    tool = {"name": "f", "input_schema": SCHEMA, "strict": strict}
    return {"messages": MESSAGES, "max_tokens": 5, "tools": [tool], "tool_choice": chosen}


DIALECTS = [
    ("/v1/chat/completions", chat, "tools[0].function.parameters"),
    ("/v1/responses", response, "tools[0].parameters"),
    ("/v1/messages", message, "tools[0].input_schema"),
]


@pytest.mark.parametrize(("path", "asked", "field"), DIALECTS)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
async def test_what_is_no_schema_is_left_out_and_named(path, asked, field, choice):
    app = App(RecordingEngine(chat_answer()))
    reply = await app.post(path, {"model": MODEL, **asked(False, choice)})
    assert reply.status == 200, reply.body
    assert reply.headers["x-thermocline-left-out"] == "properties, type"
    (tool,) = app.engine.asked[0].body["tools"]
    assert tool["function"]["parameters"] == MENDED
    strict = await app.post(path, {"model": MODEL, **asked(True, choice)})
    assert strict.status == (200 if choice == "none" else 400)
    if choice != "none":
        said = strict.json["error"]["message"]
        assert said.startswith(field) and "'bar' is not a JSON schema" in said


COUNTS = [
    ("/v1/responses/input_tokens", response),
    ("/v1/messages/count_tokens", message),
    ("/tokenize", chat),
]


@pytest.mark.parametrize(("path", "asked"), COUNTS)
async def test_the_prompt_that_is_counted_is_the_one_that_is_served(path: str, asked: Any) -> None:
    app = App(RecordingEngine(json_answer({"count": 7, "tokens": []})))
    for strict in (False, True):
        body = {"model": MODEL, **asked(strict, "auto")}
        body.pop("max_tokens", None)
        assert (await app.post(path, body)).status == 200
        (tool,) = app.engine.asked[-1].body["tools"]
        assert tool["function"]["parameters"] == MENDED
