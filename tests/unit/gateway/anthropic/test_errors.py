"""Failures under /v1/messages have Anthropic's shape, wherever they are found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.stacks.constants import configured
from engines.base import EngineUnavailable, Upstream
from engines.openai.errors import context_too_long
from gateway.keys import generate_key
from scheduler.config import SchedulerConfig
from tests.unit.gateway.in_process import (
    MODEL,
    Answered,
    App,
    RecordingEngine,
    Reply,
    chat_answer,
    json_answer,
    streamed,
)

VLLM = "This model's maximum context length is 100 tokens. However, your prompt {}, which exceeds."
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hi"}],
}


def error_of(reply: Reply) -> dict[str, Any]:
    said = reply.json
    assert set(said) == {"type", "error", "request_id"}
    assert said["type"] == "error"
    assert set(said["error"]) == {"type", "message"}
    assert said["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return dict(said["error"])


async def test_before_any_handler_runs() -> None:
    app = App(max_body_bytes=2048)
    path = "/v1/messages"
    for reply, status, kind in (
        (await app.post(path, BODY, host="evil.example"), 403, "permission_error"),
        (await app.get(path), 405, "invalid_request_error"),
        (await app.get(f"{path}/batches"), 404, "not_found_error"),
        (await app.post(path, b"{}", content_type="text/plain"), 415, "invalid_request_error"),
        (await app.post(path, {**BODY, "system": "x" * 4000}), 413, "request_too_large"),
        (await app.post(path, b"{"), 400, "invalid_request_error"),
        (await app.post(path, {**BODY, "model": "gpt-9"}), 404, "not_found_error"),
        (await app.post(path, {**BODY, "max_tokens": -2}), 400, "invalid_request_error"),
    ):
        assert (reply.status, error_of(reply)["type"]) == (status, kind)
    assert app.engine.asked == []


async def test_keys_in_either_header() -> None:
    (alice, line), (bob, other) = generate_key("alice"), generate_key("bob")
    app = App(api_keys=(line, other))
    assert error_of(await app.post("/v1/messages", BODY))["type"] == "authentication_error"
    for headers in (
        {"x_api_key": alice},
        {"authorization": f"Bearer {alice}"},
        {"authorization": f"Bearer {alice}", "x_api_key": alice},
    ):
        for path in ("/v1/messages", "/v1/chat/completions"):
            app.engine.answer = chat_answer("x")
            assert (await app.post(path, BODY, **headers)).status == 200
            assert app.engine.asked[-1].headers["x-tenant"] == "alice"
            assert alice not in str(app.engine.asked)
    for headers in (
        {"x_api_key": "nope"},
        {"authorization": f"Bearer {alice}", "x_api_key": bob},
        {"authorization": f"Bearer {alice}", "x_api_key": "a stray one"},
    ):
        assert (await app.post("/v1/messages", BODY, **headers)).status == 401


@pytest.mark.parametrize(
    ("status", "said", "expected", "kind"),
    [
        (400, {"message": "bad", "code": None}, 400, "invalid_request_error"),
        (429, {"message": "later", "code": "x"}, 429, "rate_limit_error"),
        (503, {"message": "away", "code": "x"}, 529, "overloaded_error"),
        (500, {"message": "oops"}, 502, "api_error"),
    ],
)
async def test_refusals_of_the_engine(status: int, said: Any, expected: int, kind: str) -> None:
    answer = json_answer({"error": said}, status)
    reply = await App(RecordingEngine(answer)).post("/v1/messages", BODY)
    assert (reply.status, error_of(reply)["type"]) == (expected, kind)


@pytest.mark.parametrize(
    "said",
    [
        {"message": "7 tokens", "code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 7 tokens.", "code": 400},
    ],
)
async def test_too_long_a_prompt_is_said_in_the_words_that_agents_know(said: Any) -> None:
    answer = json_answer({"error": said}, 400)
    app = App(RecordingEngine(answer))
    reply = await app.post("/v1/messages", BODY)
    message = error_of(reply)["message"]
    assert message.startswith("prompt is too long: ") and "7 tokens" in message
    assert (await app.chat()).error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        (context_too_long(100, 137, "messages").message, "137 tokens > 100 maximum"),
        (context_too_long(100, 20, "messages", at_least=True).message, "101 tokens > 100 maximum"),
        (VLLM.format("contains at least 120 input tokens"), "120 tokens > 100 maximum"),
        (VLLM.format("contains 150 input tokens"), "150 tokens > 100 maximum"),
        (VLLM.format("contains 9000 characters"), "101 tokens > 100 maximum"),
    ],
)
async def test_agents_read_by_how_much_a_prompt_is_too_long(said: str, numbers: str) -> None:
    answer = json_answer({"error": {"message": said, "code": "context_length_exceeded"}}, 400)
    reply = await App(RecordingEngine(answer)).post("/v1/messages", BODY)
    assert error_of(reply)["message"] == f"prompt is too long: {numbers}. {said}"


async def test_a_tools_schema_has_anthropics_name() -> None:
    said = "tools[2].function.parameters: the JSON schema cannot be enforced"
    app = App(RecordingEngine(json_answer({"error": {"message": said, "param": "tools"}}, 400)))
    message = error_of(await app.post("/v1/messages", BODY))["message"]
    assert message == "tools[2].input_schema: the JSON schema cannot be enforced"


@pytest.mark.parametrize("stream", [False, True])
async def test_while_there_is_no_engine(stream: bool) -> None:
    body = {**BODY, "stream": stream}
    reply = await App(RecordingEngine(welcome=None)).post("/v1/messages", body)
    assert reply.status == 529
    assert error_of(reply)["type"] == "overloaded_error"
    assert int(reply.headers["retry-after"]) >= 1


class SlowEngine(RecordingEngine):
    """Answers only after a while, and then perhaps with a failure."""

    failure: Exception | None = None

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AsyncIterator[Upstream]:
        await asyncio.sleep(0.25)
        if self.failure is not None:
            raise self.failure
        async with super().open(path, body, headers) as upstream:
            yield upstream


STREAM = streamed()


def names(reply: Reply) -> list[str]:
    lines = reply.body.decode().splitlines()
    found = [x[7:] for x in lines if x.startswith("event: ")]
    assert [json.loads(x[6:])["type"] for x in lines if x.startswith("data: ")] == found
    return found


async def test_signs_of_life_do_not_wait_for_the_engine() -> None:
    app = App(SlowEngine(STREAM), sign_of_life_s=0.06)
    found = names(await app.post("/v1/messages", {**BODY, "stream": True}))
    assert found[:3] == ["message_start", "ping", "ping"]
    quick = App(RecordingEngine(STREAM))
    needed = names(await quick.post("/v1/messages", {**BODY, "stream": True}))
    assert [x for x in found if x != "ping"] == needed
    assert (needed[0], needed[-1], "ping" in needed) == ("message_start", "message_stop", False)


@pytest.mark.parametrize("failing", ["raises", "refuses"])
async def test_a_failure_after_the_head_is_an_event(failing: str) -> None:
    body = b'{"error":{"message":"no","code":"x"}}'
    engine = SlowEngine(Answered(400, {}, body))
    if failing == "raises":
        engine.failure = EngineUnavailable("it fell over")
    app = App(engine, sign_of_life_s=0.06)
    reply = await app.post("/v1/messages", {**BODY, "stream": True})
    found = [x for x in names(reply) if x != "ping"]
    assert (reply.status, found) == (200, ["message_start", "error"])


async def test_a_full_waiting_line() -> None:
    app = App(SlowEngine(STREAM), configured(SchedulerConfig, max_running=1, max_waiting=0))
    first = asyncio.create_task(app.post("/v1/messages", {**BODY, "stream": True}))
    await asyncio.sleep(0.05)
    second = await app.post("/v1/messages", BODY)
    assert (second.status, error_of(second)["type"]) == (429, "rate_limit_error")
    assert second.headers["retry-after"]
    assert (await first).status == 200
