"""A stream on its way through: whole events, the same bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import Failure
from gateway.relay.answer import (
    ENGINE_FAILED,
    MAX_HELD_BYTES,
    AnswerStream,
    parse_usage,
    read_chunk,
)

STREAM = (
    b": keep-alive\n\n"
    b'data: {"choices":[{"delta":{"content":"caf\xc3\xa9"}}]}\n\n'
    b'data: {"choices":[{"delta":{}}],"usage":null}\r\n\r\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
    b"data: [DONE]\n\n"
)


@example([*range(1, len(STREAM))])  # byte by byte
@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=30))
def test_any_cut_gives_the_same_bytes_in_whole_events(cuts: list[int]) -> None:
    events = AnswerStream()
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    sent = [events.feed(STREAM[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert b"".join(sent) == STREAM
    assert all(x.endswith((b"\n\n", b"\r\n\r\n")) for x in sent if x)
    assert events.complete
    usage = events.usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 5)


def test_a_huge_event_is_passed_on_in_pieces() -> None:
    events = AnswerStream()
    piece = b"x" * (MAX_HELD_BYTES // 2)
    sent = [events.feed(x) for x in (b"data: ", piece, piece, piece, b"\n\n")]
    assert b"".join(sent) == b"data: " + piece * 3 + b"\n\n"
    assert len(sent[-1]) < MAX_HELD_BYTES


def test_neither_a_comment_nor_an_opening_is_a_token() -> None:
    events = AnswerStream()
    events.feed(b": prefill 1/3\n\n")
    events.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    assert (events.num_events, events.prefill) == (0, (1, 3))
    events.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n' * 3)
    assert events.num_events == 3


def test_an_end_that_comes_together_with_the_last_tokens_is_seen() -> None:
    said = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    for usage, num in ((b'data: {"choices":[],"usage":{"prompt_tokens":7}}\n\n', 5), (b"", 5)):
        events = AnswerStream(hides_usage=True)
        end = said * 3 + usage + b"data: [DONE]\n\n"
        assert events.feed(said * 2) + events.feed(end) == said * 5 + b"data: [DONE]\n\n"
        assert events.complete and events.num_events == num
        assert (events.usage is not None) == bool(usage)


def test_an_engine_that_writes_with_spaces_is_understood() -> None:
    events = AnswerStream(hides_usage=True)
    said = b'data: {"choices": [{"delta": {"content": "data: {"}}]}\n\n'
    assert events.feed(said * 3) + events.feed(said) == said * 4
    assert events.num_events == 4
    assert events.feed(b'data: {"choices": [], "usage": {"prompt_tokens": 7}}\n\n') == b""
    assert events.usage.prompt_tokens == 7


SAYING = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n'


@pytest.mark.parametrize(
    ("end", "is_one"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data: [DONE]\r\n\r\n", True),
        (b"data: [DONE]\n\n: bye\n\n", True),
        (SAYING % b"data: [DONE]", False),
        (SAYING % b"x\\ndata: [DONE]", False),
        (SAYING % b"\\n\\ndata: [DONE]\\n\\n", False),
        (SAYING % (b"say: data: [DONE]" + b"y" * 100), False),
    ],
)
def test_what_is_an_end(end: bytes, is_one: bool) -> None:
    events = AnswerStream()
    events.feed(end)
    assert events.complete == is_one
    events.feed(b"data: [DONE]\n\n")
    assert events.complete


def test_an_error_of_the_engine_is_noticed() -> None:
    events = AnswerStream()
    events.feed(b'data: {"choices":[]}\n\ndata: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n')
    assert events.failed and events.complete


def test_a_fault_in_vllm_has_our_words() -> None:
    said = {"message": "See stack trace (above)", "type": "InternalServerError", "code": 500}
    data = json.dumps({"error": said}).encode()
    shown = AnswerStream().feed(b"data: " + data + b"\n\ndata: [DONE]\n\n")
    assert shown == Failure(502, ENGINE_FAILED, None, "engine").event()
    assert read_chunk(data).failure == ENGINE_FAILED


def test_usage_that_cannot_be_read_is_none() -> None:
    for body in (b"", b"\xff", b"[]", b'{"usage": 3}', b'{"usage": {"prompt_tokens": "x"}}'):
        assert parse_usage(body) is None
    assert parse_usage(b'{"usage": null}') is None
