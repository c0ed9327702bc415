"""An engine without a model: sessions are rows with sizes, and the test chooses the failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from benchmarks.stacks.constants import configured
from engines.base import (
    CacheOutcome,
    CodecReport,
    Demoted,
    EngineReport,
    EngineUnavailable,
    KeptReason,
    Notice,
    SessionRef,
    SessionReport,
    TierName,
    Welcome,
)
from kvstore.tiers.base import TierStats
from scheduler.config import SchedulerConfig
from scheduler.session import Step
from scheduler.sessions import SessionManager
from tests.clock import Clock
from tests.reports import engine_report, session_report


class Log:
    def __init__(self) -> None:
        self.transitions: list[tuple[str, str, str, str]] = []
        self.departures: list[tuple[str, str, str]] = []
        self.decisions: list[str] = []
        self.waits: list[float] = []
        self.levels: list[tuple[str, int]] = []

    def transition(self, ref: SessionRef, step: Step) -> None:
        self.transitions.append((ref.id, step.before, step.event, step.after))
        if step.left:
            self.departures.append((ref.id, step.left, step.why))

    def row_changed(self, ref: SessionRef) -> None:
        pass

    def engine_reported(self, report: EngineReport) -> None:
        pass

    def turn_waited(self, seconds: float) -> None:
        self.waits.append(seconds)

    def decision(self, name: str) -> None:
        self.decisions.append(name)

    def memory(self, level: str, available_bytes: int) -> None:
        self.levels.append((level, available_bytes))


@dataclass
class Held:
    tokens: int = 1000
    hot: bool = True
    tier: str | None = "ram"
    pinned: bool = False
    hot_bytes: int = 100

    def report(self, tenant: str, id: str) -> SessionReport:
        sizes = {"hot_bytes": self.hot * self.hot_bytes, "cold_bytes": 20 if self.tier else 0}
        held = {"hot": self.hot, "tier": self.tier, "tokens": self.tokens, "pinned": self.pinned}
        return session_report(tenant, id, **held, **sizes)


class RowsEngine:
    """Implements the control plane of ``engines.base.Engine`` on a dict."""

    def __init__(self) -> None:
        self.welcome: Welcome | None = Welcome(
            engine="rows",
            engine_version="1",
            model="m",
            max_context=8192,
            codec=CodecReport(name="raw"),
            hibernation=True,
        )
        self.held: dict[tuple[str, str], Held] = {}
        self.capacity = 1000
        self.down = False
        self.kept: KeptReason | None = None
        self.tiers: list[TierName] = ["ram", "disk"]
        self.wakes = True  # it has room to wake sessions ahead of their turns
        self.gate: asyncio.Event | None = None  # demote and prefetch wait here
        self.forget_gate: asyncio.Event | None = None
        self.refuses: set[str] = set()  # sessions that it does not demote
        self.demoted: list[str] = []
        self.queue: asyncio.Queue[Notice | None] = asyncio.Queue()

    def _reach(self) -> None:
        if self.down:
            raise EngineUnavailable("the engine is restarting")

    def report(self, ref: SessionRef) -> SessionReport | None:
        held = self.held.get((ref.tenant, ref.id))
        return held.report(ref.tenant, ref.id) if held else None

    async def demote(self, session: SessionRef, tier: str | None = None) -> Demoted:
        self._reach()
        self.demoted.append(session.id)
        if session.id in self.refuses:
            raise EngineUnavailable("not this one")
        if self.gate:
            await self.gate.wait()
        self._reach()
        held = self.held.get((session.tenant, session.id))
        if held and not self.kept:
            held.hot = False
            held.tier = tier or held.tier
        return Demoted(self.report(session), self.kept)

    async def prefetch(self, session: SessionRef) -> SessionReport | None:
        self._reach()
        if self.gate:
            await self.gate.wait()
        held = self.held.get((session.tenant, session.id))
        if held and self.wakes:
            held.hot = True
        return self.report(session)

    async def pin(self, session: SessionRef, pinned: bool) -> SessionReport | None:
        self._reach()
        held = self.held.get((session.tenant, session.id))
        if held:
            held.pinned = pinned
        return self.report(session)

    async def forget(self, session: SessionRef) -> SessionReport | None:
        self._reach()
        if self.forget_gate:
            await self.forget_gate.wait()
        self.held.pop((session.tenant, session.id), None)
        return None

    async def sessions(self) -> list[SessionReport]:
        self._reach()
        return [held.report(*key) for key, held in self.held.items()]

    async def stats(self) -> EngineReport:
        self._reach()
        hot = sum(x.hot_bytes for x in self.held.values() if x.hot)
        tiers = [TierStats(x, 0, 0, 0, 0, 0, True) for x in self.tiers]
        return engine_report(hot, self.capacity, idle_hot_bytes=hot, tiers=tiers)

    async def notices(self) -> AsyncIterator[Notice | None]:
        while True:
            yield await self.queue.get()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def engine() -> RowsEngine:
    return RowsEngine()


def salt_of(tenant: str) -> bytes:
    return f"salt of {tenant}".encode()


@pytest.fixture
def ref():
    def make(id: str, tenant: str = "alice") -> SessionRef:
        return SessionRef(tenant=tenant, id=id, salt=salt_of(tenant))

    return make


@pytest.fixture
def manager_with(engine, clock, log):
    def make(*, engine=engine, memory=None, **settings) -> SessionManager:
        config = configured(SchedulerConfig, **settings)
        more = {} if memory is None else {"memory": memory}
        return SessionManager(engine, config, salt_of=salt_of, clock=clock, observer=log, **more)

    return make


@pytest.fixture
def manager(manager_with) -> SessionManager:
    return manager_with(idle_after_s=60.0)


@pytest.fixture
def talk(engine):
    """One whole turn: the engine holds the session hot afterwards."""

    async def turn(manager: SessionManager, ref: SessionRef) -> None:
        async with manager.turn(ref) as running:
            running.engine_answered(CacheOutcome("miss", 0))
            engine.held.setdefault((ref.tenant, ref.id), Held()).hot = True
        report = engine.report(ref)
        await engine.queue.put(Notice(cause="saved", session=report))
        manager.follower.receive(await engine.queue.get())

    return turn
