"""Streams are counted where clients did not ask for it; a chat may ask for no answer at all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.http import CACHE_HEADER, PROMPT_HEADER
from gateway.relay.answer import AnswerStream
from tests.unit.gateway.in_process import WELCOME, Answered, App, RecordingEngine

SAID = b'data: {"choices":[{"delta":{"content":"\\"choices\\":[]"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":70,"completion_tokens":9}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAMED = {
    "content-type": "text/event-stream",
    CACHE_HEADER: "hot; tokens=30",
    PROMPT_HEADER: "70",
}
VLLM = msgspec.structs.replace(WELCOME, engine="vllm")
WHOLE = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "W", "tool_calls": [{"id": "1"}]},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "W"}]},
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
}
EVENTS = (
    b": prefill 1/7\n\n"
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"W"},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


def counted(metrics: str, kind: str) -> float:
    (found,) = (
        x for x in metrics.splitlines() if f'thermocline_tokens_total{{kind="{kind}"}}' in x
    )
    return float(found.rpartition(" ")[2])


async def figures(app: App) -> str:
    return (await app.get("/metrics")).body.decode()


@given(st.lists(st.integers(1, len(SAID + USAGE + DONE) - 1), max_size=20))
def test_the_event_is_left_out_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = SAID + USAGE + DONE
    events = AnswerStream(hides_usage=True)
    edges = [0, *sorted(set(cuts)), len(stream)]
    sent = b"".join(events.feed(stream[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    assert sent == SAID + DONE
    assert events.complete
    assert events.usage.completion_tokens == 9


@pytest.mark.parametrize("fields", [{}, {"store": True}, {"functions": [{"name": "f"}]}])
async def test_a_stream_is_counted_that_did_not_ask(fields: dict[str, Any]) -> None:
    app = App(RecordingEngine(Answered(200, STREAMED, SAID + USAGE + DONE)), tokens_per_minute=60)
    reply = await app.chat(stream=True, **fields)
    assert b"[DONE]" in reply.body and b'"usage":{' not in reply.body
    assert app.engine.asked[0].body["stream_options"] == {"include_usage": True}
    assert counted(await figures(app), "answered") == 9.0
    assert (await app.chat(stream=True)).status == 429


async def test_who_asks_sees_the_counts() -> None:
    app = App(RecordingEngine(Answered(200, STREAMED, SAID + USAGE + DONE)))
    options = {"include_usage": True, "continuous_usage_stats": False}
    reply = await app.chat(stream=True, stream_options=options)
    assert reply.body == SAID + USAGE + DONE
    assert app.engine.asked[0].body["stream_options"] == options


class Endless(Answered):
    """Sends three chunks and waits; ``sent`` is set then."""

    def __init__(self) -> None:
        super().__init__(200, STREAMED, b"")
        self.sent = asyncio.Event()

    async def chunks(self) -> Any:
        yield b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        for _ in range(3):
            yield SAID
        self.sent.set()
        await asyncio.Event().wait()


async def test_an_answer_whose_client_leaves_is_counted_as_far_as_it_came() -> None:
    going_on = Endless()
    app = App(RecordingEngine(going_on), tokens_per_minute=60)
    body = {"model": "org/model-1", "messages": [{"role": "user", "content": "x"}], "stream": True}
    asked = json.dumps(body).encode()
    given_headers = {"content-type": "application/json"}
    await app.call("POST", "/v1/chat/completions", asked, given_headers, going_on.sent)
    metrics = await figures(app)
    assert counted(metrics, "answered") == 3.0
    assert (counted(metrics, "cached"), counted(metrics, "prefilled")) == (30.0, 40.0)
    assert (await app.chat()).status == 429


def app_of(kind: str, body: bytes, welcome: Any = VLLM) -> App:
    return App(RecordingEngine(Answered(200, {"content-type": kind}, body), welcome))


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_a_whole_answer(limit: str) -> None:
    app = app_of("application/json", json.dumps(WHOLE).encode())
    said = (await app.chat(**{limit: 0})).json
    assert app.engine.asked[0].body[limit] == 1
    (choice,) = said["choices"]
    assert choice["message"] == {"role": "assistant", "content": ""}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert said["usage"] == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}


async def test_a_stream() -> None:
    app = app_of("text/event-stream", EVENTS)
    reply = await app.chat(max_tokens=0, stream=True)
    assert b"W" not in reply.body and b'"usage"' not in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n") and b'"length"' in reply.body
    options = {"include_usage": True}
    shown = await app.chat(max_tokens=0, stream=True, stream_options=options)
    assert b'"completion_tokens":0' in shown.body


async def test_other_engines_and_other_chats_are_left_alone() -> None:
    body = json.dumps(WHOLE).encode()
    for app, limit in ((app_of("application/json", body, WELCOME), 0), (app_of("a", body), 1)):
        assert (await app.chat(max_tokens=limit)).body == body
        assert app.engine.asked[0].body["max_tokens"] == limit


@pytest.mark.parametrize(
    ("engine", "asked", "sent"),
    [
        ("vllm", {"n": 2, "temperature": 0}, {"temperature": 1, "top_k": 1}),
        ("vllm", {"n": 1, "temperature": 0}, {"temperature": 0, "top_k": None}),
        ("vllm", {"n": 2, "temperature": 0.5}, {"temperature": 0.5, "top_k": None}),
        ("mlx", {"n": 2, "temperature": 0}, {"temperature": 0, "top_k": None}),
    ],
)
async def test_several_greedy_answers_are_asked_of_vllm_in_a_way_that_it_takes(
    engine: str, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    welcome = msgspec.structs.replace(WELCOME, engine=engine)
    app = app_of("application/json", json.dumps(WHOLE).encode(), welcome)
    assert (await app.chat(**asked)).status == 200
    body = app.engine.asked[0].body
    assert {name: body.get(name) for name in sent} == sent
