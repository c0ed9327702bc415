"""The sessions of one engine: turns come and go, the quiet ones sleep.

``SessionManager`` is what the gateway sees. Behind it stand the table of all sessions, a follower
that keeps the table true to what the engine says, sweeps that decide who is to sleep, and the moves
that are made then. Everything runs on one event loop, so a row changes only between two awaits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engines.base import Engine, SessionRef, TierName
from scheduler.admission import Draining as Draining
from scheduler.admission import Overloaded as Overloaded
from scheduler.admission import WaitingLine
from scheduler.config import SchedulerConfig
from scheduler.follower import Follower
from scheduler.headroom import Headroom
from scheduler.headroom import MemoryScarce as MemoryScarce
from scheduler.moves import Moves
from scheduler.observer import NullObserver, Observer
from scheduler.session import Event, Session, State
from scheduler.sweeps import Sweeps
from scheduler.table import SessionTable
from scheduler.view import SessionView, view_of


class SessionKept(Exception):
    """A session was not put to sleep. ``reason``: "busy", "pinned", "no-cold-copy", "disabled", or
    "no-room" in the tier."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Turn:
    """One request of a session while it is being served."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def engine_answered(self, cache_header: str) -> None:
        """The engine has taken the turn, and its response head is there: was KV restored, or lost?

        Not to be called for an engine's refusal, which changes nothing.
        """
        self._session.known = True
        if self._session.state is State.WAKING:
            lost = cache_header.startswith("miss") or not cache_header
            self._session.apply(Event.LOST if lost else Event.RESTORED)

    def used(self, num_tokens: int) -> None:
        """Prompt and answer together: so long the session is, until the engine says it itself."""
        self._session.tokens = max(self._session.tokens, num_tokens)


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
        observer = observer or NullObserver()
        self._engine = engine
        self._config = config
        self._clock = clock
        self._observer = observer
        self._line = WaitingLine(config.max_running, config.max_waiting, config.max_wait_s)
        self.headroom = Headroom(memory, config, clock=clock, observer=observer)
        self.table = SessionTable(config.max_sessions, clock, observer)
        self._moves = Moves(engine, self.table, config, clock, observer)
        self.sweeps = Sweeps(
            engine, self.table, self._moves, self.headroom, config, clock, observer
        )
        self.follower = Follower(
            engine, self.table, salt_of=salt_of, clock=clock, on_turn=self.sweeps.hurry
        )

    async def run(self) -> None:
        """Follow the engine and sweep, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follower.run(), name="session-follower")
            group.create_task(self.sweeps.run(), name="session-sweeps")
            if self._config.memory_end_bytes:
                group.create_task(self.headroom.guard(self._engine.restart), name="memory-guard")

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
                session = self.table.begin(ref)
                try:
                    yield Turn(session)
                finally:
                    self.table.end(session)
                    self.sweeps.hurry()
        except Overloaded as error:
            scarce = isinstance(error, MemoryScarce)
            self._observer.decision("refused-memory" if scarce else "refused-full")
            raise

    def stop_admitting(self) -> None:
        self._line.close()

    @property
    def settled(self) -> bool:
        """The engine that is there now has told what it holds."""
        return self.follower.settled

    @property
    def num_running(self) -> int:
        return self._line.num_running

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    # ---- the sessions API

    def list(self, tenant: str) -> list[SessionView]:
        """Most recently used first."""
        mine = [x for x in self.table.of(tenant) if x.state is not State.LEAVING]
        mine.sort(key=lambda x: -x.last_used)
        return [self._view(x) for x in mine]

    def get(self, ref: SessionRef) -> SessionView | None:
        session = self._known(ref)
        return self._view(session) if session else None

    async def demote(self, ref: SessionRef, tier: TierName | None = None) -> SessionView | None:
        """Put to sleep now; ``tier`` also moves the cold copy down.

        Raises:
            SessionKept: it stayed as it was.
        """
        session = self._known(ref)
        if session is None:
            return None
        if kept := await self._moves.sink(session, tier):
            raise SessionKept(kept)
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
            await self._moves.wake(session)
        return self.get(ref)

    async def pin(self, ref: SessionRef, pinned: bool) -> SessionView | None:
        session = self._known(ref)
        if session is None:
            return None
        self.table.take(session, await self._engine.pin(ref, pinned))
        return self.get(ref)

    async def forget(self, ref: SessionRef) -> bool:
        """Remove from every tier. A running turn may finish; what it saves is removed as well."""
        session = self._known(ref)
        if session is None:
            return False
        with self.table.forgetting(ref):
            await self._engine.forget(ref)
        if session.can(Event.EXPIRE):
            session.apply(Event.EXPIRE)
        return True

    def _known(self, ref: SessionRef) -> Session | None:
        session = self.table.row(ref.tenant, ref.id)
        return None if session is None or session.state is State.LEAVING else session

    def _view(self, session: Session) -> SessionView:
        return view_of(session, self._clock())
