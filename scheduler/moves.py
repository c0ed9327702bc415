"""Puts a session to sleep, wakes it or removes it; the engine moves the bytes.

After every await the row is checked again: a turn may have come in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engines.base import Engine, EngineError, KeptReason, SessionReport, TierName
from scheduler.config import SchedulerConfig
from scheduler.session import SAVING, Event, Observer, Session, State
from scheduler.table import SessionTable

log = logging.getLogger("thermocline.sessions")

SAVING_LOOK_S = 0.5  # between attempts to put a session to sleep that is being saved
KEPT_RETRY_S = 15.0  # if the engine did not release a session, ask again after this long


class Moves:
    """Has the engine move sessions, a bounded number at once, and updates their rows."""

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
        # Three semaphores: urgent jobs do not wait for ordinary ones, and neither wait for attempts
        # that are repeated until a session is saved.
        self._ordinary_gate = asyncio.Semaphore(config.max_hibernations)
        self._urgent_gate = asyncio.Semaphore(config.max_hibernations)
        self._again_gate = asyncio.Semaphore(config.max_hibernations)
        # Jobs that wait until a session is saved, each with its tier, by the number of the row.
        self._save_waits: dict[int, tuple[TierName | None, asyncio.Task[None]]] = {}
        self._prefetches = asyncio.Semaphore(config.max_prefetches)

    async def demote(self, session: Session, tier: TierName | None) -> KeptReason | None:
        """Put a session to sleep on a client's request; returns and raises as ``hibernate``.

        Returns "saving" if the engine has yet to save the session: then it sleeps as soon as it is
        saved, unless a turn comes first.
        """
        waits = self._save_waits.get(session.number) if session.saving else None
        if waits is not None and tier in (None, waits[0]):
            return SAVING
        if waits is None and (kept := await self.hibernate(session, tier, "asked")) != SAVING:
            return kept
        self._sleep_when_saved(session, tier)
        return SAVING

    def _sleep_when_saved(self, session: Session, tier: TierName | None) -> None:
        session.saving = True
        self._observer.row_changed(session.ref)
        if before := self._save_waits.get(session.number):
            before[1].cancel()
        job = asyncio.create_task(self._until_asleep(session, tier), name="session-demote")
        self._save_waits[session.number] = tier, job

        def ended(_: asyncio.Task[None]) -> None:
            if self._save_waits.get(session.number) == (tier, job):
                del self._save_waits[session.number]
                session.saving = False
                self._observer.row_changed(session.ref)

        job.add_done_callback(ended)

    async def _until_asleep(self, session: Session, tier: TierName | None) -> None:
        kept: str | None = SAVING
        while kept == SAVING:
            await asyncio.sleep(SAVING_LOOK_S)
            if not session.saving:  # a turn came
                return
            try:
                kept = await self._hibernate(session, tier, "asked", self._again_gate)
            except EngineError as error:
                kept = str(error)
        if kept:
            log.info("session %s was not put to sleep: %s", session.ref.id, kept)

    def close(self) -> None:
        """Cancel the jobs that wait for saves."""
        for _, job in self._save_waits.values():
            job.cancel()

    async def hibernate(
        self, session: Session, tier: TierName | None, why: str, *, urgent: bool = False
    ) -> KeptReason | None:
        """Drop the hot copy; with ``tier`` also move the cold copy down.

        A session that is busy, or was used while this job waited for its semaphore, stays as it is.
        Returns the reason why the session stays as it is; None if it was put to sleep.

        Args:
            why: the reason for sleeping, in a word; see ``scheduler.session.Step``.
            urgent: memory is short, so this does not wait for jobs that are not urgent.

        Raises:
            EngineError: the engine did not do it; the session is as it was.
        """
        gate = self._urgent_gate if urgent else self._ordinary_gate
        return await self._hibernate(session, tier, why, gate)

    async def _hibernate(
        self, session: Session, tier: TierName | None, why: str, gate: asyncio.Semaphore
    ) -> KeptReason | None:
        last_used = session.last_used
        async with gate:
            if session.last_used != last_used or session.num_turns:
                return "busy"
            if session.state is State.IDLE:
                return await self._drop_hot_copy(session, tier, why)
            if session.state is State.COLD and tier is not None:
                return await self._move_down(session, tier, why)
            return None

    async def _drop_hot_copy(
        self, session: Session, tier: TierName | None, why: str
    ) -> KeptReason | None:
        session.apply(Event.HIBERNATE)
        job = session.hibernation
        try:
            demoted = await self._engine.demote(session.ref, tier)
        except (EngineError, asyncio.CancelledError):
            session.keep_until = self._clock() + KEPT_RETRY_S  # sweeps choose others until then
            session.complete(Event.KEPT, job)
            raise
        outcome = _outcome(demoted.report)
        if outcome is Event.KEPT:
            session.keep_until = self._clock() + KEPT_RETRY_S
        if not session.complete(outcome, job, demoted.report, why):
            # A turn has overtaken the job, or the session was forgotten meanwhile.
            return None if session.state is State.GONE else "busy"
        if demoted.report is not None:
            self._table.learn(session, demoted.report)
        return demoted.kept

    async def _move_down(self, session: Session, tier: TierName, why: str) -> KeptReason | None:
        session.keep_until = self._clock() + KEPT_RETRY_S  # reset below on success
        demoted = await self._engine.demote(session.ref, tier)
        self._table.take(session, demoted.report, why)
        if session.tier != tier:
            return demoted.kept or "no-room"
        session.keep_until = 0.0
        return None

    async def wake(self, session: Session) -> None:
        """Restore a cold session before its next turn; do nothing if it is not cold.

        Raises:
            EngineError: the engine did not do it; the session is as it was.
        """
        key = (session.ref.tenant, session.ref.id)
        async with self._prefetches:
            if session.state is not State.COLD or self._table.row(*key) is not session:
                return
            self._observer.decision("prefetch")
            waking = self._table.begin(session.ref, event=Event.WAKE)
            outcome = Event.KEPT
            try:
                report = await self._engine.prefetch(waking.ref)
                if report is not None and report.hot:
                    outcome = Event.WOKEN
            finally:
                self._table.end(waking, outcome)
            self._table.take(waking, report)

    async def remove(self, session: Session) -> None:
        """Have the engine forget a leaving session again, since its last turn may have saved KV.

        Raises:
            EngineError: the engine did not do it; a later sweep tries again.
        """
        last_used = session.last_used
        session.keep_until = self._clock() + KEPT_RETRY_S
        with self._table.forgetting(session.ref):
            await self._engine.forget(session.ref)
        unused = session.last_used == last_used and not session.num_turns
        if unused and session.can(Event.LOST):
            session.apply(Event.LOST, "forgotten")
        else:
            session.keep_until = 0.0


def _outcome(report: SessionReport | None) -> Event:
    if report is None:
        return Event.LOST
    if report.hot:
        return Event.KEPT
    return Event.EVICTED if report.tier else Event.LOST
