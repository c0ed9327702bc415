"""The loop that puts sessions to sleep: it looks at the table, and starts jobs for some sessions.

A look only starts jobs. So an engine that takes a minute to release a session does not delay the
next look at the machine's memory. Jobs that are to free memory are urgent: they have a gate of
their own (``scheduler.moves``).
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
from scheduler.policy import bytes_in_memory, bytes_over, leaving_memory, long_idle, victims
from scheduler.session import Session
from scheduler.table import Queue, SessionTable

MIN_SWEEP_GAP_S = 0.05  # turns that end in a burst share a sweep


class Sweeps:
    """Looks for sessions to put to sleep, at intervals and after every turn."""

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
        self._urgent: dict[int, Session] = {}  # have an urgent job; by number of the row
        self._with_job: set[int] = set()  # have any job; numbers of rows
        headroom.count_leaving(self._leaving_bytes)

    def hurry(self) -> None:
        """Request the next look at once."""
        self._wanted.set()

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use other marks and times from the next look on."""
        self._config = config

    async def run(self) -> None:
        """Sweep until cancelled."""
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
        """Look once, and wait for all jobs that this starts."""
        async with asyncio.TaskGroup() as jobs:
            await self.look(jobs)

    async def look(self, jobs: asyncio.TaskGroup) -> None:
        """Look once, and start jobs.

        The machine's memory comes first, then the engine's, then sessions that were long silent.
        """
        welcome = self._engine.welcome
        if welcome is None:
            return
        self._remove_forgotten(jobs)
        if not welcome.hibernation:
            return
        self._relieve_machine(jobs)
        with suppress(EngineError):  # it is restarting; when it is back it reports its sessions
            report = await self._engine.stats()
            self._observer.engine_reported(report)
            self._relieve_engine(jobs, report)
            self._let_sleep(jobs)

    def _remove_forgotten(self, jobs: asyncio.TaskGroup) -> None:
        now = self._clock()
        for session in list(self._without_job(Queue.LEAVING)):
            if now >= session.keep_until:
                self._start(jobs, session, self._remove(session))

    def _relieve_machine(self, jobs: asyncio.TaskGroup) -> None:
        if (missing := self._headroom.missing_bytes()) > 0:
            quiet = heapq.merge(
                self._without_urgent_job(Queue.HOT),
                self._without_urgent_job(Queue.PACKED),
                key=lambda x: x.last_used,
            )
            self._start_urgent(
                jobs, leaving_memory(quiet, missing, self._clock()), "memory", "disk"
            )

    def _leaving_bytes(self) -> int:
        return sum(bytes_in_memory(x) for x in self._urgent.values())

    def _relieve_engine(self, jobs: asyncio.TaskGroup, report: EngineReport) -> None:
        config = self._config
        over = bytes_over(
            report.hot_bytes, report.hot_capacity_bytes, config.high_water, config.low_water
        )
        need = min(over, report.idle_hot_bytes)
        need -= sum(x.hot_bytes for x in self._urgent.values() if x.hot)
        chosen = victims(
            self._without_urgent_job(Queue.HOT),
            need,
            self._clock(),
            config.value_half_life_s,
            config.idle_after_s,
        )
        self._start_urgent(jobs, chosen, "pressure", None)

    def _let_sleep(self, jobs: asyncio.TaskGroup) -> None:
        hot = self._without_job(Queue.HOT)
        for session in long_idle(hot, self._clock(), self._config.idle_after_s):
            self._observer.decision("hibernate-idle")
            self._start(jobs, session, self._hibernate(session, None, "idle", urgent=False))

    def _without_job(self, queue: Queue) -> Iterator[Session]:
        """Iterate over the sessions of a queue that have no job."""
        return (x for x in self._table.queue(queue) if x.number not in self._with_job)

    def _without_urgent_job(self, queue: Queue) -> Iterator[Session]:
        """Iterate over the sessions of a queue without an urgent job; others can be overtaken."""
        return (x for x in self._table.queue(queue) if x.number not in self._urgent)

    # ---- jobs

    def _start_urgent(
        self, jobs: asyncio.TaskGroup, sessions: Iterable[Session], why: str, tier: TierName | None
    ) -> None:
        for session in sessions:
            self._observer.decision(f"hibernate-{why}")
            self._urgent[session.number] = session
            job = self._hibernate(session, tier, why, urgent=True)
            self._start(jobs, session, job, self._urgent_job_ended)

    def _urgent_job_ended(self, session: Session) -> None:
        self._urgent.pop(session.number, None)

    def _start(
        self,
        jobs: asyncio.TaskGroup,
        session: Session,
        job: Coroutine[None, None, None],
        after: Callable[[Session], None] = lambda _: None,
    ) -> None:
        def ended(_: asyncio.Task[None]) -> None:
            self._with_job.discard(session.number)
            after(session)

        self._with_job.add(session.number)
        jobs.create_task(job, name="session-job").add_done_callback(ended)

    async def _hibernate(
        self, session: Session, tier: TierName | None, why: str, *, urgent: bool
    ) -> None:
        with suppress(EngineError):
            await self._moves.hibernate(session, tier, why, urgent=urgent)

    async def _remove(self, session: Session) -> None:
        with suppress(EngineError):
            await self._moves.remove(session)
