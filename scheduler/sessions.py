"""Manages the sessions of one engine: turns begin and end, quiet sessions are put to sleep.

The gateway uses ``SessionManager``, and may read its table. The manager owns the table of all
sessions, a follower that updates the table from the engine's reports, sweeps that choose sessions
to put to sleep, and moves that put them to sleep. Everything runs on one event loop, so a row
changes only at an ``await``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Final, TypeAlias

import msgspec

from engines.base import CacheOutcome, Engine, KeptReason, KVSize, SessionRef, TierName
from engines.base import Overloaded as Overloaded
from scheduler.admission import AdmissionQueue
from scheduler.admission import Draining as Draining
from scheduler.config import SchedulerConfig
from scheduler.follower import Deleted, Follower
from scheduler.headroom import Headroom
from scheduler.headroom import MemoryScarce as MemoryScarce
from scheduler.moves import Moves
from scheduler.session import (
    SAVING,
    Event,
    Kind,
    Observer,
    Observers,
    Session,
    SessionView,
    State,
    TurnHints,
    view_of,
)
from scheduler.sweeps import Sweeps
from scheduler.table import SessionTable

PLACES_ELSEWHERE = 64  # for an engine whose own limit is unknown
QUESTIONS_AT_ONCE = 4
CONVERSATIONS: Final[Collection[Kind]] = ("main", "child")
# The settings that can change while sessions are served.
RELOADABLE = ("idle_after_s",)


# A place in the list of a tenant's sessions, after which the next page begins: last use and id.
ListCursor: TypeAlias = tuple[float, str]
_cursor: Callable[[Session], ListCursor] = attrgetter("last_used", "ref.id")


class SessionKept(Exception):
    """A session was not put to sleep."""

    def __init__(self, reason: KeptReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Turn:
    """One request of a session while it is being served."""

    def __init__(self, session: Session, patience_s: float, live_kv: KVSize | None) -> None:
        """
        Args:
            patience_s: what is left of ``max_wait_s`` for the engine's own line, in seconds.
            live_kv: the size of the engine's live KV; None if the engine does not report it.
        """
        self._session = session
        self.patience_s = patience_s
        self._live_kv = live_kv

    def engine_answered(self, cache: CacheOutcome | None) -> None:
        """Record that the engine has taken the turn, and whether it restored KV for it.

        Must not be called for an engine's refusal, which changes nothing.

        Args:
            cache: what the response head reports; None if it reports nothing.
        """
        self._session.known = True
        if self._session.state is State.WAKING:
            lost = cache is None or cache.source == "miss"
            self._session.apply(Event.LOST if lost else Event.RESTORED)

    def used(self, num_tokens: int) -> None:
        """Estimate length and size by the tokens of prompt and answer, until the engine reports."""
        session = self._session
        if num_tokens > session.tokens:
            session.tokens = num_tokens
            live_bytes = self._live_kv.of(num_tokens) if self._live_kv else 0
            session.hot_bytes = max(session.hot_bytes, live_bytes)


class SessionManager:
    """Admits turns and manages their sessions; see above."""

    def __init__(
        self,
        engine: Engine,
        config: SchedulerConfig,
        *,
        salt_of: Callable[[str], bytes],
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        memory: Callable[[], int | None] = lambda: None,
        is_task: Callable[[str], bool] = lambda id: False,
        headroom: Headroom | None = None,
    ) -> None:
        """Make a manager; nothing runs before ``run``.

        Args:
            salt_of: returns the salt of a tenant by its name.
            clock: in seconds; only differences count.
            memory: returns the bytes that the machine has left, or None if they are unknown.
            is_task: returns whether a session that the engine lists holds tasks, given its id.
            headroom: the watch over memory that all models of the machine share; None = there is
                one model: watch ``memory`` here, and restart the engine below the last mark.
        """
        observer = self._observers = Observers(*([observer] if observer else []))
        self._engine = engine
        self._config = config
        self._clock = clock
        waits = config.max_waiting, config.max_wait_s
        self._admission = AdmissionQueue(config.max_running or PLACES_ELSEWHERE, *waits)
        self._questions = AdmissionQueue(QUESTIONS_AT_ONCE, *waits)
        self.headroom = headroom or Headroom(memory, config, clock=clock, observer=observer)
        self._guards = headroom is None and self.headroom.guards
        self.table = SessionTable(config.max_sessions, clock, observer)
        self._moves = Moves(engine, self.table, config, clock, observer)
        self.sweeps = Sweeps(
            engine, self.table, self._moves, self.headroom, config, clock, observer
        )
        self.follower = Follower(
            engine,
            self.table,
            salt_of=salt_of,
            clock=clock,
            hurry=self.sweeps.hurry,
            is_task=is_task,
        )

    def check_deleted(self, deleted: Deleted) -> None:
        """Remove the sessions that ``deleted`` returns, whenever the engine lists its sessions."""
        self.follower.check_deleted(deleted)

    def observe(self, observer: Observer) -> None:
        """Add an observer, which receives everything from now on."""
        self._observers.add(observer)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Apply the settings named in ``RELOADABLE``; all others stay as they were."""
        changed = {name: getattr(config, name) for name in RELOADABLE}
        self._config = msgspec.structs.replace(self._config, **changed)
        self.sweeps.reconfigure(self._config)

    async def run(self) -> None:
        """Follow the engine and sweep, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.follower.run(), name="session-follower")
                group.create_task(self.sweeps.run(), name="session-sweeps")
                if self._guards:
                    guard = self.headroom.guard(self._engine.restart)
                    group.create_task(guard, name="memory-guard")
        finally:
            self._moves.close()

    # ---- turns

    @asynccontextmanager
    async def turn(
        self,
        ref: SessionRef,
        hints: TurnHints | None = None,
        weight: int = 1,
        num_answers: int = 1,
    ) -> AsyncIterator[Turn]:
        """Serve one request of a session.

        Args:
            hints: its client's hints about the session.
            weight: the weight of its tenant, to which the tenant's share of places is proportional.
            num_answers: the number of answers that it asks for; each takes a place.

        Raises (on entering):
            Overloaded: the waiting line is full, or (MemoryScarce) the machine's memory is.
            Draining: the gateway is shutting down.
        """
        came = self._clock()
        try:
            self.headroom.admit()
            is_task = hints is not None and hints.is_task
            async with self._admission.slot(ref.tenant, weight, num_answers, is_task=is_task):
                self.headroom.admit()
                waited_s = self._clock() - came
                self._observers.turn_waited(waited_s)
                session, engine = self.table.begin(ref, hints), self._engine.welcome
                live_kv = engine.live_kv if engine else None
                try:
                    yield Turn(session, self._config.max_wait_s - waited_s, live_kv)
                finally:
                    self.table.end(session)
                    self.sweeps.hurry()
        except Overloaded as error:
            scarce = isinstance(error, MemoryScarce)
            self._observers.decision("refused-memory" if scarce else "refused-full")
            raise

    @asynccontextmanager
    async def question(self, tenant: str, weight: int = 1) -> AsyncIterator[None]:
        """Admit a request that is not a turn; at most ``QUESTIONS_AT_ONCE`` run at once.

        Raises as ``turn`` does.
        """
        self.headroom.admit()
        async with self._questions.slot(tenant, weight):
            yield

    def engine_unloaded(self, rests_in: TierName) -> None:
        """Record that the engine has ended on purpose, after it saved all sessions.

        Args:
            rests_in: the tier that outlives an engine. The next engine reports its real sessions.
        """
        for session in list(self.table):
            if session.state is State.IDLE:
                session.apply(Event.EVICTED, "unloaded")
            if session.state is State.COLD and (not session.tier or session.goes_with_engine):
                session.tier = rests_in
                self._observers.row_changed(session.ref)

    def stop_admitting(self) -> None:
        """Refuse new turns from now on; running ones continue."""
        self._admission.close()
        self._questions.close()

    @property
    def water_marks(self) -> tuple[float, float]:
        """The shares of the engine's hot bytes between which sessions are put to sleep."""
        return self._config.high_water, self._config.low_water

    @property
    def settled(self) -> bool:
        """True once the engine that is connected now has listed its sessions."""
        return self.follower.settled

    @property
    def memory_is_scarce(self) -> bool:
        """True while the machine has less memory free than it should."""
        return self.headroom.scarce

    @property
    def num_running(self) -> int:
        """Number of turns that hold a slot."""
        return self._admission.num_running

    @property
    def num_waiting(self) -> int:
        """Number of turns that wait for a slot."""
        return self._admission.num_waiting

    # ---- the sessions API

    def num_sessions(self, tenant: str) -> int:
        """Count a tenant's conversations, hot and cold."""
        return len(self.ids(tenant))

    def ids(self, tenant: str) -> Sequence[str]:
        """Return the ids of a tenant's conversations, hot and cold."""
        return [x.ref.id for x in self.table.of(tenant) if not x.is_task]

    def list(
        self,
        tenant: str,
        most: int | None = None,
        after: ListCursor | None = None,
        kinds: Collection[Kind] = CONVERSATIONS,
    ) -> list[SessionView]:
        """List a tenant's sessions of some kinds, the most recently used first.

        Args:
            most: the most sessions to list; None = all.
            after: only those after this place, whose session need not exist any more.
        """
        mine = [
            x
            for x in self.table.of(tenant)
            if x.kind in kinds
            and x.state is not State.LEAVING
            and (after is None or _cursor(x) < after)
        ]
        few = sorted(mine, key=_cursor, reverse=True)[:most]
        return [self._view(x) for x in few]

    def place(self, ref: SessionRef) -> ListCursor | None:
        """Return the place of a session in the list; None if it is unknown."""
        session = self._known(ref)
        return _cursor(session) if session else None

    def began(self, tenant: str, id: str) -> float | None:
        """Return when a session's first turn here began, by the scheduler's clock.

        -inf: the engine had it before, and reported it. None: it is unknown.
        """
        session = self.table.row(tenant, id)
        return None if session is None or session.state is State.LEAVING else session.began

    def get(self, ref: SessionRef) -> SessionView | None:
        """Return one session; None if it is unknown."""
        session = self._known(ref)
        return self._view(session) if session else None

    async def demote(self, ref: SessionRef, tier: TierName | None = None) -> SessionView | None:
        """Put a session to sleep now; ``tier`` also moves the cold copy down.

        A session that is still being saved is shown as saving, and sleeps once it is saved.
        Returns None if the session is unknown.

        Raises:
            SessionKept: it stayed as it was.
            EngineError: the engine did not do it.
        """
        session = self._known(ref)
        if session is None:
            return None
        if (kept := await self._moves.demote(session, tier)) not in (None, SAVING):
            raise SessionKept(kept)
        return self.get(ref)

    async def prefetch(self, ref: SessionRef) -> SessionView | None:
        """Wake a session before its next turn comes; a hot session is not changed.

        Returns None if the session is unknown.

        Raises:
            MemoryScarce: the machine has too little memory left for it.
            EngineError: the engine did not do it.
        """
        session = self._known(ref)
        if session is None:
            return None
        if session.state is State.COLD:
            self.headroom.admit()
            await self._moves.wake(session)
        return self.get(ref)

    async def pin(self, ref: SessionRef, pinned: bool) -> SessionView | None:
        """Protect a session from sleep and eviction, or stop that; None if it is unknown.

        Raises:
            EngineError: the engine did not do it.
        """
        session = self._known(ref)
        if session is None:
            return None
        self.table.take(session, await self._engine.pin(ref, pinned))
        return self.get(ref)

    async def forget(self, ref: SessionRef) -> bool:
        """Remove a session from every tier; return False if it is unknown.

        A running turn may finish; the data that it saves is removed as well.

        Raises:
            EngineError: the engine did not do it.
        """
        session = self._known(ref)
        if session is None:
            return False
        with self.table.forgetting(ref):
            await self._engine.forget(ref)
        if session.can(Event.EXPIRE):
            session.apply(Event.EXPIRE, "forgotten")
        return True

    async def forget_deleted(self, ref: SessionRef) -> None:
        """Remove a session that was deleted at another server, whether or not it is known here.

        It is no longer listed from this moment, even while the engine is away.

        Raises:
            EngineError: the engine did not do it; call again later.
        """
        session = self._known(ref)
        if session is not None and session.can(Event.EXPIRE):
            session.apply(Event.EXPIRE, "forgotten")
        with self.table.forgetting(ref):
            await self._engine.forget(ref)

    def _known(self, ref: SessionRef) -> Session | None:
        session = self.table.row(ref.tenant, ref.id)
        return None if session is None or session.state is State.LEAVING else session

    def _view(self, session: Session) -> SessionView:
        return view_of(session, self._clock(), self._engine.welcome is not None)
