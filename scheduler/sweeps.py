"""The loop that puts sessions to sleep: a look at the table, and jobs for what it found.

A look only starts jobs. So an engine that takes a minute to let a session go delays no look at the
machine's memory, and what presses goes through a gate of its own (``scheduler.moves``).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress

from engines.base import Engine, EngineError, EngineReport, TierName
from scheduler.config import SchedulerConfig
from scheduler.headroom import Headroom
from scheduler.moves import Moves
from scheduler.observer import Observer
from scheduler.policy import bytes_in_memory, bytes_over, leaving, long_idle, victims
from scheduler.session import Session
from scheduler.table import Queue, SessionTable

MIN_SWEEP_GAP_S = 0.05  # turns that end in a burst share a sweep


class Sweeps:
    def __init__(
        self,
        engine: Engine,
        table: SessionTable,
        moves: Moves,
        headroom: Headroom,
        config: SchedulerConfig,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self._engine = engine
        self._table = table
        self._moves = moves
        self._headroom = headroom
        self._config = config
        self._clock = clock
        self._observer = observer
        self._wanted = asyncio.Event()
        self._pressing: dict[int, Session] = {}  # leaving already, by the number of the row
        self._moving: set[int] = set()  # these and all others that have a job

    def hurry(self) -> None:
        """Look again before it is time."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as jobs:
            while True:
                with suppress(TimeoutError):
                    # Not wait_for: before Python 3.12 it can lose a cancellation.
                    async with asyncio.timeout(self._config.sweep_every_s):
                        await self._wanted.wait()
                self._wanted.clear()
                await self.look(jobs)
                await asyncio.sleep(MIN_SWEEP_GAP_S)

    async def sweep(self) -> None:
        """One look, and all that comes of it."""
        async with asyncio.TaskGroup() as jobs:
            await self.look(jobs)

    async def look(self, jobs: asyncio.TaskGroup) -> None:
        """What presses comes first: the machine's memory, then the engine's, then long silence."""
        welcome = self._engine.welcome
        if welcome is None:
            return
        self._remove_forgotten(jobs)
        if not welcome.hibernation:
            return
        self._relieve_machine(jobs)
        with suppress(EngineError):  # it is restarting; when it is back it says what it holds
            self._relieve_engine(jobs, await self._engine.stats())
            self._let_sleep(jobs)

    def _remove_forgotten(self, jobs: asyncio.TaskGroup) -> None:
        now = self._clock()
        for session in list(self._resting(Queue.LEAVING)):
            if now >= session.keep_until:
                self._start(jobs, session, self._removed(session))

    def _relieve_machine(self, jobs: asyncio.TaskGroup) -> None:
        missing = self._headroom.missing_bytes()
        missing -= sum(bytes_in_memory(x) for x in self._pressing.values())
        if missing > 0:
            quiet = heapq.merge(
                self._unpressed(Queue.HOT),
                self._unpressed(Queue.PACKED),
                key=lambda x: x.last_used,
            )
            self._press(jobs, leaving(quiet, missing, self._clock()), "hibernate-memory", "disk")

    def _relieve_engine(self, jobs: asyncio.TaskGroup, report: EngineReport) -> None:
        config = self._config
        over = bytes_over(
            report.hot_bytes, report.hot_capacity_bytes, config.high_water, config.low_water
        )
        need = min(over, report.idle_hot_bytes)
        need -= sum(x.hot_bytes for x in self._pressing.values() if x.hot)
        chosen = victims(
            self._unpressed(Queue.HOT),
            need,
            self._clock(),
            config.value_half_life_s,
            config.idle_after_s,
        )
        self._press(jobs, chosen, "hibernate-pressure", None)

    def _let_sleep(self, jobs: asyncio.TaskGroup) -> None:
        resting = self._resting(Queue.HOT)
        for session in long_idle(resting, self._clock(), self._config.idle_after_s):
            self._observer.decision("hibernate-idle")
            self._start(jobs, session, self._sunk(session, None, pressing=False))

    def _resting(self, queue: Queue) -> Iterator[Session]:
        """Those for whom nothing is under way."""
        return (x for x in self._table.queue(queue) if x.number not in self._moving)

    def _unpressed(self, queue: Queue) -> Iterator[Session]:
        """Also those whose turn to go at leisure has not come: what presses overtakes them."""
        return (x for x in self._table.queue(queue) if x.number not in self._pressing)

    # ---- jobs

    def _press(
        self, jobs: asyncio.TaskGroup, sessions: Iterable[Session], why: str, tier: TierName | None
    ) -> None:
        for session in sessions:
            self._observer.decision(why)
            self._pressing[session.number] = session
            job = self._sunk(session, tier, pressing=True)
            self._start(jobs, session, job, self._pressed)

    def _pressed(self, session: Session) -> None:
        self._pressing.pop(session.number, None)

    def _start(
        self,
        jobs: asyncio.TaskGroup,
        session: Session,
        job: Coroutine[None, None, None],
        after: Callable[[Session], None] = lambda _: None,
    ) -> None:
        def ended(_: asyncio.Task[None]) -> None:
            self._moving.discard(session.number)
            after(session)

        self._moving.add(session.number)
        jobs.create_task(job, name="session-job").add_done_callback(ended)

    async def _sunk(self, session: Session, tier: TierName | None, *, pressing: bool) -> None:
        with suppress(EngineError):
            await self._moves.sink(session, tier, pressing=pressing)

    async def _removed(self, session: Session) -> None:
        with suppress(EngineError):
            await self._moves.remove(session)
