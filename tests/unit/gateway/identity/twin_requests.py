"""Requests that come twice, and an engine that answers when the test lets it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engines.base import Upstream
from gateway.identity.twins import SharedTurn
from gateway.watch.requests import LiveRequest
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, Reply

EVENTS = {"content-type": "text/event-stream"}
SAID = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % i for i in range(3)]
DONE = b"data: [DONE]\n\n"


@dataclass
class Slow:
    """An ``Upstream`` that gives each chunk once the test says it."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: EVENTS)
    said: asyncio.Queue[bytes | Exception] = field(default_factory=asyncio.Queue)

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self.said.get():
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def read(self) -> bytes:
        return b"".join([x async for x in self.chunks()])

    def say(self, *chunks: bytes | Exception) -> None:
        for chunk in chunks:
            self.said.put_nowait(chunk)


class SlowEngine(RecordingEngine):
    """Its head comes when ``head`` is set; counts the requests that were cancelled."""

    def __init__(self, headers: Mapping[str, str] = EVENTS) -> None:
        super().__init__()
        self.slow = Slow(headers=headers)
        self.head = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.num_ended = 0

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float = 0.0
    ) -> AsyncIterator[Upstream]:
        try:
            async with super().open(path, body, headers):
                await self.head.wait()
                yield self.slow
        finally:
            await self.may_end.wait()
            self.num_ended += 1


class Asking:
    """Requests as tasks, each with a client that may leave."""

    def __init__(self, app: App) -> None:
        self._app = app

    @property
    def running(self) -> SharedTurn[LiveRequest]:
        """The only turn that runs."""
        (running,) = self._app.model.twins.running.values()
        return running

    async def joined(self, num: int) -> None:
        """Wait until a turn has so many twins."""
        running = self._app.model.twins.running
        await until(lambda: [x.num_twins for x in running.values()] == [num])

    def ask(
        self,
        leaves: asyncio.Event | None = None,
        session: str = "mine",
        path: str = "/v1/chat/completions",
        reads: asyncio.Event | None = None,
        retries: str = "",
        **fields: Any,
    ) -> asyncio.Task[Reply]:
        body = {"model": MODEL, "stream": True}
        if path.endswith("chat/completions"):
            body["messages"] = [{"role": "user", "content": "hi"}]
        headers = {
            "content-type": "application/json",
            "x-session-id": session,
            "x-stainless-retry-count": retries,
        }
        data = json.dumps({**body, **fields}).encode()
        return asyncio.create_task(self._app.call("POST", path, data, headers, leaves, reads))


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
