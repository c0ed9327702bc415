"""A chat that asks for nothing gets nothing, on an engine that cannot give nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.unit.gateway.in_process import WELCOME, Answered, App, RecordingEngine

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
