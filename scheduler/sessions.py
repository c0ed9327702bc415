"""The sessions of one engine: turns come and go, the quiet ones sleep.

``SessionManager`` owns the table. Everything runs on one event loop, so a row changes only between
two awaits; whatever was awaited, the row is looked at afresh afterwards. Bytes are moved by the
engine; here it is only decided when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from engines.base import (
    Engine,
    EngineError,
    EngineReport,
    Notice,
    SessionRef,
    SessionReport,
    TierName,
    Welcome,
)
from scheduler.admission import Draining as Draining
from scheduler.admission import Overloaded as Overloaded
from scheduler.admission import WaitingLine
from scheduler.config import SchedulerConfig
from scheduler.headroom import Headroom
from scheduler.headroom import MemoryScarce as MemoryScarce
from scheduler.observer import NullObserver, Observer
from scheduler.policy import bytes_over, leaving, long_idle, victims
from scheduler.session import Event, Session, State
from scheduler.view import SessionView, view_of

TableKey = tuple[str, str]  # tenant, session id

MIN_SWEEP_GAP_S = 0.05  # turns that end in a burst share a sweep
KEPT_RETRY_S = 15.0  # when the engine would not let a session go, ask again after this long


class Turn:
    """One request of a session while it is being served."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def engine_answered(self, cache_header: str) -> None:
        """The engine's response head is there: was the KV restored, or lost?"""
        if self._session.state is State.WAKING:
            lost = cache_header.startswith("miss") or not cache_header
            self._session.apply(Event.LOST if lost else Event.RESTORED)


class SessionManager:
    def __init__(
        self,
        engine: Engine,
        config: SchedulerConfig,
        *,
        salt_of: Callable[[str], bytes],
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``memory`` gives the bytes that the machine has left, or None where nobody knows."""
        self._engine = engine
        self._config = config
        self._salt_of = salt_of
        self._clock = clock
        self._observer = observer or NullObserver()
        self.headroom = Headroom(memory, config, clock=clock, observer=self._observer)
        self._table: dict[TableKey, Session] = {}
        self._line = WaitingLine(config.max_running, config.max_waiting, config.max_wait_s)
        self._hibernations = asyncio.Semaphore(config.max_hibernations)
        self._prefetches = asyncio.Semaphore(config.max_prefetches)
        self._wanted = asyncio.Event()  # a sweep before its time
        self._followed: Welcome | None = None  # whose sessions the table tells

    # ---- turns

    @asynccontextmanager
    async def turn(self, ref: SessionRef) -> AsyncIterator[Turn]:
        """Serve one request of a session.

        Raises (on entering):
            Overloaded: the waiting line is full, or (MemoryScarce) the machine's memory is.
            Draining: the gateway is shutting down.
        """
        came = self._clock()
        try:
            self.headroom.admit()
            async with self._line.place(ref.tenant):
                self.headroom.admit()
                self._observer.turn_waited(self._clock() - came)
                session = self._begin(ref)
                try:
                    yield Turn(session)
                finally:
                    await self._end(session)
        except Overloaded as error:
            scarce = isinstance(error, MemoryScarce)
            self._observer.decision("refused-memory" if scarce else "refused-full")
            raise

    def _begin(self, ref: SessionRef) -> Session:
        session = self._table.get(_key(ref))
        if session is None:
            session = self._add(ref, State.ACTIVE)
        else:
            session.apply(Event.TURN)
        session.num_turns += 1
        session.last_used = self._clock()
        return session

    async def _end(self, session: Session) -> None:
        session.num_turns -= 1
        session.last_used = self._clock()
        if session.num_turns > 0:
            return
        if session.state is State.WAKING:  # the turn died before the engine answered
            session.apply(Event.LOST)
        session.apply(Event.QUIET)
        self._wanted.set()
        if session.doomed:
            await self._forget_quiet(session)

    # ---- the sessions API

    def list(self, tenant: str) -> list[SessionView]:
        """Most recently used first."""
        mine = [x for (owner, _), x in self._table.items() if owner == tenant and not x.doomed]
        mine.sort(key=lambda x: -x.last_used)
        return [self._view(x) for x in mine]

    def get(self, ref: SessionRef) -> SessionView | None:
        session = self._known(ref)
        return self._view(session) if session else None

    async def demote(self, ref: SessionRef, tier: TierName | None = None) -> SessionView | None:
        """Put to sleep now; ``tier`` also moves the cold copy down. Busy sessions stay hot."""
        session = self._known(ref)
        if session is None:
            return None
        await self._sink(session, tier)
        return self.get(ref)

    async def prefetch(self, ref: SessionRef) -> SessionView | None:
        """Wake before the next turn comes. Nothing to do for a session that is hot.

        Raises:
            MemoryScarce: a waking session would need what the machine has not.
        """
        session = self._known(ref)
        if session is None:
            return None
        if session.state is State.COLD:
            self.headroom.admit()
            await self._wake(session)
        return self.get(ref)

    async def pin(self, ref: SessionRef, pinned: bool) -> SessionView | None:
        session = self._known(ref)
        if session is None:
            return None
        report = await self._engine.pin(ref, pinned)
        self._take(session, report)
        session.pinned = pinned
        return self.get(ref)

    async def forget(self, ref: SessionRef) -> bool:
        """Remove from every tier. A running turn may finish; what it saves is removed as well."""
        session = self._known(ref)
        if session is None:
            return False
        await self._engine.forget(ref)
        session.doomed = True
        if session.num_turns == 0:
            await self._forget_quiet(session)
        return True

    # ---- the loop

    async def run(self) -> None:
        """Follow the engine and sweep, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="session-notices")
            group.create_task(self._sweep_forever(), name="session-sweeps")
            if self._config.memory_end_bytes:
                group.create_task(self.headroom.guard(self._engine.restart), name="memory-guard")

    def stop_admitting(self) -> None:
        self._line.close()

    @property
    def settled(self) -> bool:
        """The engine that is there now was asked what it holds."""
        return self._followed is not None and self._followed is self._engine.welcome

    @property
    def num_running(self) -> int:
        return self._line.num_running

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    async def sweep(self) -> None:
        """One look at the table: who was quiet for too long; then pressure, the machine's first."""
        welcome = self._engine.welcome
        if welcome is None or not welcome.hibernation:
            return
        due = long_idle(self._table.values(), self._clock(), self._config.idle_after_s)
        await self._hibernate_all(due, "hibernate-idle")
        missing = self.headroom.missing_bytes()
        gone = leaving(self._table.values(), missing, self._clock()) if missing else ()
        await self._hibernate_all(gone, "hibernate-memory", "disk")
        report = await self._engine.stats()
        await self._hibernate_all(self._under_pressure(report), "hibernate-pressure")

    async def _sweep_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), self._config.sweep_every_s)
            self._wanted.clear()
            with suppress(EngineError):  # restarting; when it is back it says what it holds
                await self.sweep()
            await asyncio.sleep(MIN_SWEEP_GAP_S)

    def _under_pressure(self, report: EngineReport) -> Sequence[Session]:
        config = self._config
        over = bytes_over(
            report.hot_bytes, report.hot_capacity_bytes, config.high_water, config.low_water
        )
        need = min(over, report.idle_hot_bytes)
        return victims(self._table.values(), need, self._clock(), config.value_half_life_s)

    async def _hibernate_all(
        self, sessions: Iterable[Session], why: str, tier: TierName | None = None
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                self._observer.decision(why)
                group.create_task(self._sink_if_reachable(session, tier))

    async def _sink_if_reachable(self, session: Session, tier: TierName | None) -> None:
        with suppress(EngineError):
            await self._sink(session, tier)

    async def _sink(self, session: Session, tier: TierName | None) -> None:
        if session.state is State.IDLE:
            await self._hibernate(session, tier)
        elif session.state is State.COLD and tier is not None:
            async with self._hibernations:
                demoted = await self._engine.demote(session.ref, tier)
            self._take(session, demoted.report)
            if session.tier != tier:  # that tier is full, or off
                session.keep_until = self._clock() + KEPT_RETRY_S

    async def _hibernate(self, session: Session, tier: TierName | None = None) -> None:
        async with self._hibernations:
            if session.state is not State.IDLE:
                return
            session.apply(Event.HIBERNATE)
            job = session.hibernation
            try:
                demoted = await self._engine.demote(session.ref, tier)
            except (EngineError, asyncio.CancelledError):
                session.complete(Event.KEPT, job)
                raise
            report = demoted.report
            outcome = _outcome(report)
            if session.complete(outcome, job) and report is not None:
                session.learn(report)
            if outcome is Event.KEPT:
                session.keep_until = self._clock() + KEPT_RETRY_S
            self._drop_if_gone(session)

    async def _wake(self, session: Session) -> None:
        """A prefetch is a turn without tokens."""
        async with self._prefetches:
            if session.state is not State.COLD:
                return
            self._observer.decision("prefetch")
            session.apply(Event.TURN)
            session.num_turns += 1
            try:
                report = await self._engine.prefetch(session.ref)
                if session.can(Event.RESTORED):  # no turn has come in between
                    session.apply(Event.RESTORED if report and report.hot else Event.LOST)
            finally:
                await self._end(session)
            self._take(session, report)

    # ---- what the engine says

    async def _follow(self) -> None:
        async for notice in self._engine.notices():
            if notice is None:
                await self._adopt_all()
            else:
                self._notice(notice)

    def _notice(self, notice: Notice) -> None:
        report = notice.session
        session = self._table.get((report.tenant, report.id))
        if session is not None:
            self._take(session, report)
        elif report.hot or report.tier is not None:
            self._adopt(report)
        if notice.cause in ("saved", "turn"):
            self._wanted.set()

    async def _adopt_all(self) -> None:
        """The engine is new, or we are: believe what it has, forget what it has not."""
        welcome = self._engine.welcome
        try:
            reports = {(x.tenant, x.id): x for x in await self._engine.sessions()}
        except EngineError:
            return  # it is gone again, or will be asked again when the next one says hello
        finally:
            self._followed = welcome
        for key, session in list(self._table.items()):
            self._take(session, reports.pop(key, None))
        for report in reports.values():
            self._adopt(report)

    def _adopt(self, report: SessionReport) -> None:
        ref = SessionRef(tenant=report.tenant, id=report.id, salt=self._salt_of(report.tenant))
        session = self._add(ref, State.IDLE if report.hot else State.COLD)
        session.last_used = self._clock() - report.idle_s
        session.learn(report)

    def _take(self, session: Session, report: SessionReport | None) -> None:
        """Fold a report into the row; a quiet session follows what the engine really holds."""
        if report is not None:
            session.learn(report)
        if session.state in (State.IDLE, State.COLD):
            there = report is not None and (report.hot or report.tier is not None)
            if not there:
                session.apply(Event.LOST)
            elif session.state is State.IDLE and report is not None and not report.hot:
                session.apply(Event.EVICTED)
        self._drop_if_gone(session)

    # ---- the table

    def _known(self, ref: SessionRef) -> Session | None:
        session = self._table.get(_key(ref))
        return None if session is None or session.doomed else session

    def _add(self, ref: SessionRef, state: State) -> Session:
        self._make_room()
        session = Session(ref=ref, state=state, last_used=self._clock(), listener=self._transition)
        self._table[_key(ref)] = session
        return session

    def _make_room(self) -> None:
        """Keep the table bounded. A row is only a belief: the cold copy stays usable without it."""
        if len(self._table) < self._config.max_sessions:
            return
        cold = [x for x in self._table.values() if x.state is State.COLD]
        if cold:
            del self._table[_key(min(cold, key=lambda x: x.last_used).ref)]

    async def _forget_quiet(self, session: Session) -> None:
        await self._engine.forget(session.ref)
        if session.can(Event.EXPIRE):
            session.apply(Event.EXPIRE)
        self._drop_if_gone(session)

    def _drop_if_gone(self, session: Session) -> None:
        if session.state is State.GONE and self._table.get(_key(session.ref)) is session:
            del self._table[_key(session.ref)]

    def _transition(self, session_id: str, before: State, event: Event, after: State) -> None:
        self._observer.transition(session_id, before.value, event.value, after.value)

    def _view(self, session: Session) -> SessionView:
        return view_of(session, self._clock())


def _key(ref: SessionRef) -> TableKey:
    return ref.tenant, ref.id


def _outcome(report: SessionReport | None) -> Event:
    if report is None:
        return Event.LOST
    if report.hot:
        return Event.KEPT
    return Event.EVICTED if report.tier else Event.LOST
