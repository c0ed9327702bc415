"""Replicas that record what they are asked, and a pool of some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from engines.base import (
    Demoted,
    EngineBusy,
    EngineUnavailable,
    EngineUnreached,
    SessionRef,
    TierName,
    Upstream,
)
from engines.http import session_headers
from engines.pool.replica_choice import Homes
from engines.pool.replica_pool import ReplicaPool
from engines.wire import EngineReport, Notice, SessionReport, TierStats, absent
from tests.unit.gateway.in_process import WELCOME, Answered, RecordingEngine

NO_WORK = EngineReport(
    **dict.fromkeys(("hot_bytes", "idle_hot_bytes", "hot_capacity_bytes", "active_bytes"), 0),
    **dict.fromkeys(("num_running", "num_waiting", "save_queue_bytes"), 0),
    tiers=[],
    counters={},
)


class Engine(RecordingEngine):
    """A replica that can be ended, and records its requests."""

    def __init__(self) -> None:
        super().__init__(welcome=None)
        self.held: dict[str, SessionReport] = {}
        self.forgotten: list[str] = []
        self.demoted: list[str] = []
        self.restarts: list[str] = []
        self.num_turns = 0
        self.dies_with_next = self.takes_no_connection = self.is_stopped = False
        self.is_busy_for = 0  # tries to connect
        self.fails_with: EngineUnavailable | None = None
        self.gave_up = False
        self.heard: asyncio.Queue[Notice | None] = asyncio.Queue()

    async def start(self) -> None:
        self.begin()

    def begin(self, **changes: object) -> None:
        self.welcome = msgspec.structs.replace(WELCOME, **changes)
        self.heard.put_nowait(None)

    def die(self) -> None:
        self.welcome = None
        self.held.clear()

    def restart(self, why: str) -> None:
        self.restarts.append(why)

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AsyncIterator[Upstream]:
        if not self.ready or self.takes_no_connection:
            raise EngineUnreached("it takes no connections")
        if self.is_busy_for:
            self.is_busy_for -= 1
            raise EngineBusy("it takes no connections")
        self.num_turns += 1
        if self.fails_with is not None:
            raise self.fails_with
        if self.dies_with_next:
            self.die()
            raise EngineUnavailable("the connection broke")
        yield self.answer

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        self.demoted.append(session.id)
        return Demoted(None, None)

    async def forget(self, session: SessionRef) -> SessionReport | None:
        if not self.ready:
            raise EngineUnavailable("gone")
        self.forgotten.append(session.id)
        return self.held.pop(session.id, None)

    async def sessions(self) -> list[SessionReport]:
        return list(self.held.values())

    async def stats(self) -> EngineReport:
        if self.is_stopped:
            await asyncio.Event().wait()
        held = {"hot_bytes": 10, "idle_hot_bytes": 5, "hot_capacity_bytes": 100, "num_running": 1}
        ram = TierStats("ram", 7, 70, 1, 0, 0, True)
        counters = {"turns": self.num_turns}
        return msgspec.structs.replace(NO_WORK, **held, tiers=[ram], counters=counters)

    async def notices(self) -> AsyncIterator[Notice | None]:
        while True:
            yield await self.heard.get()


class Dying(Answered):
    """An answer whose engine ends after some pieces."""

    def __init__(self, engine: Engine, *pieces: bytes, leaves_control: bool = False) -> None:
        super().__init__(200, {"content-type": "text/event-stream"}, b"")
        self._engine, self._pieces, self._leaves_control = engine, pieces, leaves_control

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        if not self._leaves_control:
            self._engine.die()
        raise EngineUnavailable("the connection broke")


class Rig:
    """A pool of some replicas, and a clock that stands still."""

    def __init__(self, num_replicas: int = 3) -> None:
        self.now = 1000.0
        self.engines = {str(i): Engine() for i in range(num_replicas)}
        self.pool = ReplicaPool(self.engines, Homes(1000), 4, clock=lambda: self.now)

    async def __aenter__(self) -> Rig:
        await self.pool.start()
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.stop(0)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def name(self, session: SessionRef) -> str:
        return self.pool._choice.choose(session).name

    async def turn(self, session: SessionRef, wait_s: float = 5.0) -> bytes:
        headers = session_headers(session)
        async with self.pool.open("/v1/chat/completions", b"{}", headers, wait_s) as upstream:
            return await upstream.read()


def ref(number: int) -> SessionRef:
    return SessionRef("tenant", f"s{number}", b"")


def report(number: int, *, hot: bool, idle_s: float = 1.0) -> SessionReport:
    return msgspec.structs.replace(absent(ref(number)), hot=hot, tier="ram", idle_s=idle_s)
