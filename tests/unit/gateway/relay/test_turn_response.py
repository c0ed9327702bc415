"""A turn as its client sees it that leaves, takes nothing, waits too long or asks again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.base import Upstream
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, Reply, streamed
from tests.waiting import eventually

SAID = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % i for i in range(3)]
DONE = b"data: [DONE]\n\n"


class Slow:
    """An ``Upstream`` that gives each chunk once the test says it."""

    status = 200
    headers: Mapping[str, str] = {"content-type": "text/event-stream"}

    def __init__(self) -> None:
        self._said: asyncio.Queue[bytes] = asyncio.Queue()

    def say(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self._said.put_nowait(chunk)

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self._said.get():
            yield chunk

    async def read(self) -> bytes:
        return b"".join([x async for x in self.chunks()])


class SlowEngine(RecordingEngine):
    """Its head comes when ``head`` is set; counts the requests that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = Slow()
        self.head = asyncio.Event()
        self.num_ended = 0

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AsyncIterator[Upstream]:
        try:
            async with super().open(path, body, headers):
                await self.head.wait()
                yield self.slow
        finally:
            self.num_ended += 1


def ask(
    app: App, leaves: asyncio.Event | None = None, reads: asyncio.Event | None = None
) -> asyncio.Task[Reply]:
    """Send a request as a task; its client may leave, or read only once it may."""
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": True}).encode()
    headers = {"content-type": "application/json", "x-session-id": "mine"}
    return asyncio.create_task(
        app.call("POST", "/v1/chat/completions", body, headers, leaves, reads)
    )


@pytest.mark.parametrize("answers", [False, True])
async def test_a_turn_ends_when_its_client_leaves(answers: bool) -> None:
    app = App(engine := SlowEngine())
    leaves = asyncio.Event()
    asked = ask(app, leaves)
    await eventually(lambda: engine.asked)
    if answers:
        engine.head.set()
        engine.slow.say(SAID[0])
    assert app.sessions.num_running == 1
    leaves.set()
    await asked
    assert engine.num_ended == 1 and app.sessions.num_running == 0


async def test_a_client_that_takes_nothing_is_cut_and_its_turn_is_counted() -> None:
    app = App(engine := SlowEngine(), client_stall_s=0.05)
    engine.head.set()
    engine.slow.say(*SAID[:2])
    assert (await ask(app, reads=asyncio.Event())).body == b""
    assert engine.num_ended == 1 and app.sessions.num_running == 0
    assert b'thermocline_tokens_total{kind="answered"} 1.0' in (await app.get("/metrics")).body


@pytest.mark.parametrize(("answers", "status"), [(False, 504), (True, 200)])
async def test_a_turn_lasts_no_longer_than_it_may(answers: bool, status: int) -> None:
    app = App(engine := SlowEngine(), request_timeout_s=0.2)
    if answers:
        engine.head.set()
        engine.slow.say(SAID[0])
    reply = await ask(app)
    assert reply.status == status and b'"error"' in reply.body
    assert reply.body.startswith(SAID[0]) == answers
    assert engine.num_ended == 1 and app.sessions.num_running == 0


async def test_a_request_that_is_sent_again_is_a_turn_of_its_own() -> None:
    app = App(engine := SlowEngine())
    leaves = asyncio.Event()
    first = ask(app, leaves)
    await eventually(lambda: engine.asked)
    second = ask(app)
    await eventually(lambda: len(engine.asked) == 2)
    leaves.set()
    await first
    engine.head.set()
    engine.slow.say(*SAID, DONE, b"")
    assert (await second).body == b"".join(SAID) + DONE


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ],
)
async def test_proxies_are_asked_to_pass_every_stream_on_at_once(path: str, fields: Any) -> None:
    app = App(RecordingEngine(streamed()))
    reply = await app.post(path, {"model": MODEL, "stream": True, **fields})
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-accel-buffering"] == "no"
