"""Chooses the sessions to put to sleep, in a loop over the quiet rows of the table.

The value of keeping a session hot is the time that waking it would cost, per byte it holds, halved
for every ``half_life_s`` of silence:

    value = wake_s / hot_bytes * 2 ** (-idle_s / half_life_s)

A session with a cold copy wakes by unpacking, which costs far less than a prefill; one without is
expensive to lose. Prefill grows faster than linearly with the prompt since every token attends to
all before it. Only the order of the values matters, so the rates are plain constants.

A session's group comes before its value. Tasks sleep first, since no turn continues them; then
child sessions, which end with a job of their parent; then ordinary ones; then those that their
clients ask to keep; last the parents of a child that is being served, since they continue when it
is done.
A client's wish counts only within its tenant's share of the memory in question. Otherwise tenants
that ask to keep everything would push out those that ask for nothing.

``Sweeps.look`` only starts jobs. So an engine that takes a minute to release a session does not
delay the next check of the machine's memory. Jobs that are to free memory are urgent, and have a
semaphore of their own (``scheduler.moves``).
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice, takewhile
from typing import Final

from engines.base import TIERS, Engine, EngineError, EngineReport, TierName
from scheduler.config import SchedulerConfig
from scheduler.headroom import Headroom
from scheduler.moves import Moves
from scheduler.session import Kind, Observer, Session, State
from scheduler.table import Queue, SessionTable

PREFILL_S_PER_TOKEN = 1e-3
PREFILL_QUADRATIC_TOKENS = 8192  # context at which attention doubles the price of a token
MAX_WEIGHED = 4096  # sessions that a sweep sorts by group, the longest quiet; bounds its time
SWEEP_EVERY_S = 1.0
_KINDS: Final[Sequence[Kind]] = ("task", "child", "main")  # by group
RETAINED: Final = 3  # the group of sessions that their clients ask to keep
MIN_SWEEP_GAP_S = 0.05  # turns that end in a burst share a sweep


def wake_seconds(session: Session) -> float:
    """Estimate how long the next turn would wait if the session were dropped now.

    The unit is relative: only the order of results has a meaning.
    """
    tokens = session.tokens
    prefill = tokens * (1 + tokens / PREFILL_QUADRATIC_TOKENS) * PREFILL_S_PER_TOKEN
    return prefill * TIERS[session.tier].restore_share if session.tier else prefill


def value(session: Session, now: float, half_life_s: float) -> float:
    """Return the value of keeping the session hot; see above."""
    idle_s = max(0.0, now - session.last_used)
    per_byte = wake_seconds(session) / max(1, session.hot_bytes)
    return float(per_byte * 2.0 ** (-idle_s / half_life_s))


def group_of(session: Session, now: float) -> int:
    """Return the session's group; the lowest sleeps first. See above."""
    if session.num_children:
        return 4
    if now < session.retain_until:
        return RETAINED
    return _KINDS.index(session.kind)


def groups_of(
    sessions: Sequence[Session], size: Callable[[Session], int], now: float
) -> dict[int, int]:
    """Return the group of each session, by the number of its row.

    Clients' wishes to keep sessions count within their tenant's share, an equal part of all these
    sessions' bytes; the latest used sessions of the tenant fill it first.
    """
    found = {x.number: group_of(x, now) for x in sessions}
    tenants = {x.ref.tenant for x in sessions}
    left = dict.fromkeys(tenants, sum(map(size, sessions)) / max(1, len(tenants)))
    for session in sorted(sessions, key=lambda x: -x.last_used):
        if found[session.number] >= RETAINED:
            left[session.ref.tenant] -= size(session)
            if left[session.ref.tenant] < 0:
                found[session.number] = _KINDS.index(session.kind)
    return found


def may_sleep(session: Session, now: float) -> bool:
    """True if the session is idle and its hot copy may be dropped."""
    return session.state is State.IDLE and not session.pinned and now >= session.keep_until


def long_idle(sessions: Iterable[Session], now: float, idle_after_s: float) -> list[Session]:
    """Choose sessions that were idle for ``idle_after_s``, without a reason to keep them.

    The first one that is too young ends the search, so the cost does not grow with the table.

    Args:
        sessions: the longest idle first.
    """
    old = takewhile(lambda x: now - x.last_used >= idle_after_s, sessions)
    return [x for x in old if may_sleep(x, now) and group_of(x, now) < RETAINED]


def victims(
    sessions: Iterable[Session],
    need_bytes: int,
    now: float,
    half_life_s: float,
    idle_after_s: float = math.inf,
) -> list[Session]:
    """Choose idle sessions that together free ``need_bytes``; never pinned ones.

    They are ordered by group. Within a group, those that are idle for ``idle_after_s`` come first,
    since they would go anyway; then the least valuable ones.
    """
    if need_bytes <= 0:
        return []
    candidates = [x for x in sessions if may_sleep(x, now) and x.hot_bytes > 0]
    order = groups_of(candidates, lambda x: x.hot_bytes, now)
    candidates.sort(
        key=lambda x: (
            order[x.number],
            now - x.last_used < idle_after_s,
            value(x, now, half_life_s),
        )
    )
    return _enough(candidates, need_bytes, lambda x: x.hot_bytes)


def may_leave_memory(session: Session, now: float) -> bool:
    """True if the session is quiet and holds memory, hot or packed, that it may give up."""
    in_ram = session.state is State.COLD and session.goes_with_engine and not session.pinned
    return may_sleep(session, now) or (in_ram and now >= session.keep_until)


def leaving_memory(sessions: Iterable[Session], need_bytes: int, now: float) -> list[Session]:
    """Choose quiet sessions, hot or packed in memory, that together hold ``need_bytes``.

    Args:
        sessions: the longest quiet first, the order in which they leave within a group.
    """
    quiet = (x for x in sessions if may_leave_memory(x, now))
    looked_at = list(islice(quiet, MAX_WEIGHED))
    order = groups_of(looked_at, bytes_in_memory, now)
    looked_at.sort(key=lambda x: order[x.number])
    return _enough(chain(looked_at, quiet), need_bytes, bytes_in_memory)


def bytes_in_memory(session: Session) -> int:
    """Count the bytes that the machine gets back when a session moves to disk."""
    return (session.hot_bytes if session.hot else 0) + session.cold_bytes


def _enough(
    sessions: Iterable[Session], need_bytes: int, size: Callable[[Session], int]
) -> list[Session]:
    """Take sessions from the first on until they hold ``need_bytes``."""
    chosen: list[Session] = []
    for session in sessions:
        if need_bytes <= 0:
            break
        chosen.append(session)
        need_bytes -= size(session)
    return chosen


def bytes_over(hot_bytes: int, capacity_bytes: int, high_water: float, low_water: float) -> int:
    """Count the bytes to be freed: 0 up to high water, else all above low water."""
    if hot_bytes <= capacity_bytes * high_water:
        return 0
    return int(hot_bytes - capacity_bytes * low_water)


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
        self._urgent: dict[int, Session] = {}  # sessions with an urgent job, by row number
        self._with_job: set[int] = set()  # row numbers of sessions with any job
        headroom.count_leaving(self._leaving_bytes)

    def hurry(self) -> None:
        """Request a sweep at once."""
        self._wanted.set()

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use other marks and times from the next sweep on."""
        self._config = config

    async def run(self) -> None:
        """Sweep until cancelled."""
        async with asyncio.TaskGroup() as jobs:
            while True:
                with suppress(TimeoutError):
                    # Not wait_for: before Python 3.12 it can lose a cancellation.
                    async with asyncio.timeout(SWEEP_EVERY_S):
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
        with suppress(EngineError):  # it is restarting; when it is back it reports its sessions
            report = await self._engine.stats()
            self._observer.engine_reported(report)
            self._relieve_machine(jobs, report)
            self._relieve_engine(jobs, report)
            self._let_sleep(jobs)

    def _remove_forgotten(self, jobs: asyncio.TaskGroup) -> None:
        now = self._clock()
        for session in list(self._without_job(Queue.LEAVING)):
            if now >= session.keep_until:
                self._start(jobs, session, self._remove(session))

    def _relieve_machine(self, jobs: asyncio.TaskGroup, report: EngineReport) -> None:
        if (missing := self._headroom.missing_bytes()) > 0:
            names = (x.name for x in report.tiers)
            below_memory = next((x for x in names if TIERS[x].outlives_engine), None)
            queues = [Queue.HOT] if below_memory is None else [Queue.HOT, Queue.PACKED]
            quiet = heapq.merge(*map(self._without_urgent_job, queues), key=lambda x: x.last_used)
            leaving = leaving_memory(quiet, missing, self._clock())
            self._start_urgent(jobs, leaving, "memory", below_memory)

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
        """Iterate over a queue's sessions without an urgent job; ordinary jobs can be overtaken."""
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
