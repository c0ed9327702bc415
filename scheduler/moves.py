"""What is done to one session: put to sleep, woken, removed. The engine moves the bytes.

Whatever was awaited, the row is looked at afresh afterwards: a turn may have come in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engines.base import Engine, EngineError, SessionReport, TierName
from scheduler.config import SchedulerConfig
from scheduler.observer import Observer
from scheduler.session import Event, Session, State
from scheduler.table import SessionTable

KEPT_RETRY_S = 15.0  # when the engine would not let a session go, ask again after this long


class Moves:
    def __init__(
        self,
        engine: Engine,
        table: SessionTable,
        config: SchedulerConfig,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self._engine = engine
        self._table = table
        self._clock = clock
        self._observer = observer
        # Two gates: what presses never waits until an engine has let others go.
        self._at_leisure = asyncio.Semaphore(config.max_hibernations)
        self._pressing = asyncio.Semaphore(config.max_hibernations)
        self._prefetches = asyncio.Semaphore(config.max_prefetches)

    async def sink(
        self, session: Session, tier: TierName | None = None, *, pressing: bool = False
    ) -> str:
        """Drop the hot copy; with ``tier`` also move the cold copy down. Busy sessions stay.

        A session that was used while this waited for its place stays as well.
        Gives why the session stayed as it was, "" if it did not. Raises ``EngineError``.
        """
        last_used = session.last_used
        async with self._pressing if pressing else self._at_leisure:
            if session.last_used != last_used or session.num_turns:
                return "busy"
            if session.state is State.IDLE:
                return await self._hibernate(session, tier)
            if session.state is State.COLD and tier is not None:
                return await self._move_down(session, tier)
            return ""

    async def _hibernate(self, session: Session, tier: TierName | None) -> str:
        session.apply(Event.HIBERNATE)
        job = session.hibernation
        try:
            demoted = await self._engine.demote(session.ref, tier)
        except (EngineError, asyncio.CancelledError):
            session.keep_until = self._clock() + KEPT_RETRY_S  # let the sweeps try another
            session.complete(Event.KEPT, job)
            raise
        outcome = _outcome(demoted.report)
        if outcome is Event.KEPT:
            session.keep_until = self._clock() + KEPT_RETRY_S
        if not session.complete(outcome, job):
            # A turn has overtaken it, or somebody who forgot it.
            return "" if session.state is State.GONE else "busy"
        if demoted.report is not None:
            self._table.learn(session, demoted.report)
        return demoted.kept

    async def _move_down(self, session: Session, tier: TierName) -> str:
        session.keep_until = self._clock() + KEPT_RETRY_S  # unless it gets there
        demoted = await self._engine.demote(session.ref, tier)
        self._table.take(session, demoted.report)
        if session.tier != tier:
            return demoted.kept or "no-room"
        session.keep_until = 0.0
        return ""

    async def wake(self, session: Session) -> None:
        """A prefetch is a turn without tokens. Raises ``EngineError``; then all is as it was."""
        async with self._prefetches:
            if session.state is not State.COLD:
                return
            self._observer.decision("prefetch")
            waking = self._table.begin(session.ref)
            try:
                report = await self._engine.prefetch(waking.ref)
                if waking.state is State.WAKING:  # no turn has come in between
                    waking.apply(Event.RESTORED if report and report.hot else Event.LOST)
            finally:
                self._table.end(waking)
            self._table.take(waking, report)

    async def remove(self, session: Session) -> None:
        """Once more, after the last turn of a session that was forgotten while it was served.

        Raises ``EngineError``; then it is for the next sweep after a while.
        """
        last_used = session.last_used
        session.keep_until = self._clock() + KEPT_RETRY_S
        with self._table.forgetting(session.ref):
            await self._engine.forget(session.ref)
        if session.last_used == last_used and session.can(Event.LOST):
            session.apply(Event.LOST)
        else:
            session.keep_until = 0.0


def _outcome(report: SessionReport | None) -> Event:
    if report is None:
        return Event.LOST
    if report.hot:
        return Event.KEPT
    return Event.EVICTED if report.tier else Event.LOST
