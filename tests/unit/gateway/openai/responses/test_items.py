"""Items become the messages that a chat would have had."""

from __future__ import annotations

from typing import Any

import pytest

from engines.openai.errors import InvalidRequest
from engines.openai.messages import NO_IMAGES
from engines.openai.requests import validate_chat
from gateway.openai.responses.items import MessageWriter


def written(*items: dict[str, Any]) -> list[dict[str, Any]]:
    writer = MessageWriter(NO_IMAGES)
    writer.add_all(items, "input")
    messages = writer.messages()
    validate_chat({"model": "m", "messages": messages})
    return messages


def call(number: int, **fields: Any) -> dict[str, Any]:
    named = {"type": "function_call", "call_id": f"call_{number}", "name": "look"}
    return {**named, "arguments": "{}", **fields}


def test_an_agents_items_become_one_message_per_turn() -> None:
    messages = written(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": [{"type": "input_text", "text": x} for x in ("hel", "lo")]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        call(1),
        call(2),
        {"type": "function_call_output", "call_id": "call_1", "output": "one"},
        {"type": "function_call_output", "call_id": "call_2", "output": [
            {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        call(3),
    )  # fmt: skip
    assert [x["role"] for x in messages] == ["system", "user", "assistant", "tool", "tool"] + [
        "assistant"
    ]
    assert messages[1]["content"] == "hello"
    said = messages[2]
    assert (said["content"], said["reasoning_content"]) == ("I", "hm")
    assert [x["id"] for x in said["tool_calls"]] == ["call_1", "call_2"]
    assert [x["content"] for x in messages[3:5]] == ["one", "two"]
    assert messages[5]["reasoning_content"] == "so"
    assert messages[5]["tool_calls"][0]["id"] == "call_3"


def test_tools_that_are_not_run_here_become_calls() -> None:
    shell = {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}
    said, result = written(shell, {"type": "local_shell_call_output", "id": "c", "output": "a b"})
    called = said["tool_calls"][0]["function"]
    assert (called["name"], called["arguments"]) == ("local_shell", '{"action":{"command":["ls"]}}')
    assert result == {"role": "tool", "tool_call_id": "c", "content": "a b"}


def test_custom_calls_are_functions_with_one_argument() -> None:
    made = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"'}
    (said,) = written(made)
    assert said["tool_calls"][0]["function"]["arguments"] == '{"input":"a \\"b\\""}'


def test_unknown_kinds_are_skipped_and_named() -> None:
    writer = MessageWriter(NO_IMAGES)
    writer.add_all([{"type": "web_search_call", "id": "ws_1"}, {"type": "novelty"}], "input")
    assert (writer.messages(), writer.skipped) == ([], ["web_search_call", "novelty"])


def test_reasoning_without_an_answer_is_dropped() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    question = {"role": "user", "content": "and?"}
    answer = {"role": "assistant", "content": "well"}
    assert written(thought, question, answer) == [question, answer]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "king", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0].type"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        (call(1, name=None), "input[0].name"),
        (call(1, arguments={}), "input[0]"),
    ],
)
def test_an_unreadable_item_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        written(item)
    assert (caught.value.param, caught.value.status) == (param, 400)
