"""Streams of chats become streams of messages, judged by Anthropic's own client library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engines.base import EngineUnavailable
from gateway.anthropic.events import MessageEvents
from gateway.anthropic.message import Asked, whole_message
from gateway.errors import Failure

ASKED = Asked("msg_1", "claude-x", 100, True, None)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 7},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def chunk(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, **choice}], "usage": None}


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    head = {"id": f"call_{index}", "type": "function"} if name else {}
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return chunk({"tool_calls": [{"index": index, **head, "function": function}]})


def stream(*chunks: dict[str, Any], usage: dict[str, Any] | None = USAGE) -> bytes:
    last = [{"choices": [], "usage": usage}] if usage else []
    events = [b"data: " + json.dumps(x).encode() + b"\n\n" for x in (*chunks, *last)]
    return b": prefill 1/2\n\n" + b"".join(events) + b"data: [DONE]\n\n"


def answer(text: str, usage: dict[str, Any], **choice: Any) -> bytes:
    """A whole answer, which stopped unless ``choice`` says why it ended."""
    said = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}
    return json.dumps({"choices": [said], "usage": usage}).encode()


def translated(body: bytes, asked: Asked = ASKED, *cuts: int) -> bytes:
    events = MessageEvents(asked)
    out = [events.opening()]
    edges = [0, *sorted(x % (len(body) + 1) for x in cuts), len(body)]
    out += [events.feed(body[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert events.complete
    return b"".join(out) + events.ending(None)


def parsed(out: bytes) -> list[Any]:
    found = []
    for block in out.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(EVENT.validate_python(event))
    return found


def accumulated(out: bytes) -> Message:
    """Add up the events with the library's own code."""
    message, buffers = None, {}
    for event in parsed(out):
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    assert message is not None
    return message


TEXT = [chunk({"role": "assistant", "content": ""}), chunk({"content": "He"})]
FULL = stream(
    chunk({"reasoning_content": "let me"}),
    chunk({"reasoning": " see"}),
    *TEXT,
    chunk({"content": 'y "you" \u2028 ✓'}),
    call(0, "", "ls"),
    call(0, '{"a":'),
    call(0, "1}"),
    call(1, "{}", "pwd"),
    chunk({}, finish_reason="tool_calls"),
)


def test_everything_in_one_answer():
    kinds = [x.type for x in parsed(translated(FULL))]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message = accumulated(translated(FULL))
    thinking, text, first, second = (x.to_dict() for x in message.content)
    assert thinking["thinking"] == "let me see" and thinking["signature"]
    assert text["text"] == 'Hey "you" \u2028 ✓'
    assert (first["name"], first["input"], first["id"]) == ("ls", {"a": 1}, "call_0")
    assert (second["name"], second["input"]) == ("pwd", {})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.input_tokens == 3
    assert message.usage.cache_read_input_tokens == 7
    assert message.usage.output_tokens == 4
    assert message.usage.output_tokens_details.thinking_tokens == 2


def test_blocks_open_and_close_one_after_the_other():
    open_block = None
    for event in parsed(translated(FULL)):
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
        elif event.type == "content_block_delta":
            assert event.index == open_block
        elif event.type == "content_block_stop":
            assert event.index == open_block
            open_block = None
    assert open_block is None


@given(st.lists(st.integers(min_value=0, max_value=1 << 16), max_size=20))
def test_any_boundaries_give_the_same_events(cuts: list[int]):
    assert translated(FULL, ASKED, *cuts) == translated(FULL)
    assert translated(FULL.replace(b"\n", b"\r\n"), ASKED, *cuts) == translated(FULL)


@pytest.mark.parametrize(
    ("choice", "tokens", "reason", "sequence"),
    [
        ({"finish_reason": "stop"}, 4, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, 4, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 2}, 4, "end_turn", None),
        ({"finish_reason": "length"}, 100, "max_tokens", None),
        ({"finish_reason": "length"}, 40, "model_context_window_exceeded", None),
        ({"finish_reason": "content_filter"}, 4, "refusal", None),
    ],
)
def test_why_it_ended(choice: Any, tokens: int, reason: str, sequence: str | None):
    usage = {"prompt_tokens": 3, "completion_tokens": tokens}
    body = stream(*TEXT, chunk({}, **choice), usage=usage)
    streamed = accumulated(translated(body))
    whole = json.loads(whole_message(ASKED, answer("He", usage, **choice), None))
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert whole["content"] == [x.to_dict() for x in streamed.content]


@pytest.mark.parametrize(
    ("arguments", "stopped_by", "reason"), [("{}", None, "tool_use"), ('{"a', "b", "stop_sequence")]
)
def test_a_forced_call_is_to_be_run_unless_a_stop_string_cut_it_short(
    arguments, stopped_by, reason
):
    ended = chunk({}, finish_reason="stop", stop_reason=stopped_by)
    assert accumulated(translated(stream(call(0, arguments, "f"), ended))).stop_reason == reason


def test_thoughts_that_are_not_to_be_shown():
    asked = ASKED._replace(shows_thoughts=False)
    thinking, text, *_ = accumulated(translated(FULL, asked)).content
    assert thinking.type == "thinking" and thinking.thinking == "" and thinking.signature
    assert text.type == "text"


def test_a_prefetch_says_nothing():
    message = accumulated(translated(FULL, ASKED._replace(max_tokens=0)))
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert (message.usage.output_tokens, message.usage.cache_read_input_tokens) == (0, 7)


@pytest.mark.parametrize(("ttl", "created"), [("5m", (3, 0)), ("1h", (0, 3)), (None, (0, 0))])
def test_tokens_that_were_asked_to_be_kept_count_as_created(ttl: Any, created: tuple[int, int]):
    made = whole_message(ASKED._replace(ttl=ttl), answer("x", USAGE), None)
    usage = Message.model_validate_json(made).usage
    assert usage.cache_creation is not None
    assert usage.cache_creation_input_tokens == sum(created)
    assert usage.input_tokens == 3 - sum(created)
    assert usage.cache_read_input_tokens == 7
    split = usage.cache_creation
    assert (split.ephemeral_5m_input_tokens, split.ephemeral_1h_input_tokens) == created


@pytest.mark.parametrize(
    "body", [b"data: {half\n\n", b"data: \xff\xfe\n\n", b'data: {"error":{"message":"oh"}}\n\n']
)
def test_an_engines_error_message_ends_the_stream(body: bytes):
    events = MessageEvents(ASKED)
    out = events.feed(stream(*TEXT)[:-40] + b"\n\n" + body)
    assert events.failed
    name, data = out.decode().split("\n\n")[-2].split("\n")
    assert name == "event: error"
    assert json.loads(data[6:])["error"]["type"] == "api_error"
    assert events.feed(stream(*TEXT)) == b""
    assert events.ending(None) == events.ending(Failure(503, "x")) == b""


def test_a_stream_that_breaks_off_ends_with_an_error():
    events = MessageEvents(ASKED)
    events.feed(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    assert not events.complete
    name, data, *_ = events.ending(Failure(503, "gone")).decode().split("\n")
    assert name == "event: error"
    assert json.loads(data[6:])["error"] == {"type": "overloaded_error", "message": "gone"}


def test_a_line_without_end_is_not_held_for_ever():
    events = MessageEvents(ASKED)
    for _ in range(17):
        out = events.feed(b"x" * (1 << 20))
    assert events.failed and b"event: error" in out


def test_an_answer_whose_tokens_are_not_counted():
    uncounted = {"prompt_tokens": 5, "completion_tokens": None}
    whole = whole_message(ASKED, answer("x", uncounted), None)
    usage = Message.model_validate_json(whole).usage
    assert (usage.input_tokens, usage.output_tokens) == (5, 0)
    streamed = accumulated(translated(stream(*TEXT, usage=uncounted)))
    assert (streamed.usage.input_tokens, streamed.usage.output_tokens) == (5, 0)


@pytest.mark.parametrize("max_tokens", [0, 100])
@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"oh"}}', b"{}", b'{"choices":[]}', b'{"choices":[{}]}', b"[]"]
)
def test_a_whole_answer_that_is_none(body: bytes, max_tokens: int):
    with pytest.raises(EngineUnavailable):
        whole_message(ASKED._replace(max_tokens=max_tokens), body, None)
