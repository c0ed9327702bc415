"""The engine's end of the control connection: the gateway's verbs, reports and notices.

Verbs run on the event loop. They change hot KV by short commands to the owner thread, and use
other threads for work that may wait for a disk or a network. So no verb delays a running sequence.
Reports may be made on any thread, and may wait for a tier.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeAlias

import mlx.core as mx
import msgspec

from engines.config import CalibrationOrder
from engines.mlx_worker.owner import Owner
from engines.mlx_worker.sessions.cold_sessions import HotSession
from engines.mlx_worker.sessions.hot_sessions import Cause
from engines.wire import (
    CodecReport,
    Done,
    EngineReport,
    KeptReason,
    Notice,
    SessionReport,
    TenantUses,
    absent,
)
from kvstore.ledger.notices import StoreNotice
from kvstore.ledger.record import SessionRecord
from kvstore.session import SessionName, SessionRef, TenantLimits, TierName
from kvstore.stats import StoreStats

logger = logging.getLogger(__name__)
_Changes: TypeAlias = dict[tuple[str, str, Cause], tuple[SessionRef, str]]
# Seconds that a demote waits for a running save; after that the gateway has to ask again.
SAVE_WAIT_S: Final = 5.0
# Seconds that a prefetch may take before the caller gets an answer without it.
WAKE_WAIT_S: Final = 60.0
_NO_STORE: Final = StoreStats(
    counters={}, save_queue_bytes=0, write_queue_bytes={}, num_sessions=0, tiers=[]
)


class SessionReports:
    """Makes reports from the hot sessions and from the store's records."""

    def __init__(
        self, owner: Owner, measuring: Callable[[CodecReport], CodecReport] = lambda report: report
    ) -> None:
        """``measuring`` adds the state of a measurement to a codec report."""
        self._owner = owner
        self._measuring = measuring
        self._hot = owner.batching.hot_cache.sessions
        self._store = owner.store

    def session(self, session: SessionRef) -> SessionReport | None:
        """Return the report on a session; None if neither the engine nor the store knows it."""
        record = self._store.record(session) if self._store else None
        return self._report(session.name, record)

    def sessions(self) -> list[SessionReport]:
        """Return the reports on all sessions, hot and cold; waits until those on Redis are read."""
        found = self._store.records() if self._store else []
        records = {(x.tenant, x.id): x for x in found}
        keys = dict.fromkeys([*records, *(x.key for x in self._hot.all()), *self._hot.busy()])
        reports = (self._report(key, records.get(key)) for key in keys)
        return [x for x in reports if x is not None]

    def _report(self, key: SessionName, record: SessionRecord | None) -> SessionReport | None:
        hot, busy_tokens = self._hot.get(key), self._hot.busy_tokens(key)
        if hot is None and record is None and not busy_tokens:
            return None
        idle_s = self._hot.idle_s(hot) if hot else 0.0
        if record is not None and hot is None:
            idle_s = max(0.0, time.time() - record.last_used_s)
        cold_tokens = record.num_tokens if record else 0
        running_bytes = self._owner.plan.cost.row_bytes(busy_tokens) if busy_tokens else 0
        return SessionReport(
            tenant=key[0],
            id=key[1],
            hot=hot is not None or busy_tokens > 0,
            tier=self._store.tier_of(record) if self._store and record else None,
            tokens=hot.num_tokens if hot else busy_tokens or cold_tokens,
            hot_bytes=hot.nbytes if hot else running_bytes,
            cold_bytes=record.packed_bytes if record else 0,
            idle_s=0.0 if busy_tokens else idle_s,
            pinned=self._hot.is_pinned(key) or (record is not None and record.pinned),
            busy=busy_tokens > 0,
            cold_tokens=cold_tokens,
        )

    # ---- the engine

    def engine(self) -> EngineReport:
        """Return the report on the engine: memory, queues, tiers, counters since the start."""
        owner, batching = self._owner, self._owner.batching
        store = self._store.stats() if self._store else _NO_STORE
        active, measured = mx.get_active_memory(), owner.held.nbytes if owner.held else 0
        # Report the misses of turns, not those of the store, which counts look-ups.
        stored = {x: n for x, n in store.counters.items() if not x.startswith("misses.")}
        return EngineReport(
            hot_bytes=max(0, active - owner.weight_bytes - measured),
            idle_hot_bytes=self._hot.nbytes,
            hot_capacity_bytes=batching.budget.hot_bytes,
            active_bytes=active,
            num_running=len(batching.batches) + len(batching.prefiller.admitted),
            num_waiting=owner.num_waiting,
            save_queue_bytes=store.save_queue_bytes,
            tiers=store.tiers,
            counters={**stored, **batching.counters},
            codec=self.codec(),
            requests=[x.progress for x in batching.requests.all() if x.key and not x.is_waiting],
            repacking=store.repacking,
            differs=store.differs,
        )

    def codec(self) -> CodecReport:
        """Return the report on the codec that packs cold KV."""
        if (codecs := self._owner.codecs) is not None:
            return self._measuring(codecs.report)
        return CodecReport(name="none", why=self._owner.facts.hibernation_reason)


class Notifier:
    """Turns changes of sessions into notices; equal changes in quick succession are merged."""

    def __init__(
        self,
        reports: SessionReports,
        publish: Callable[[Notice], None],
        saved: Callable[[SessionRef], Awaitable[None]],
    ) -> None:
        """``saved`` is awaited for every session that has just been saved."""
        self._reports = reports
        self._publish = publish
        self._saved = saved
        self._changes: _Changes = {}
        self._changed = asyncio.Event()

    def receive(self, cause: Cause, session: SessionRef, why: str = "") -> None:
        """Queue a change. Called on the event loop."""
        change = (session.tenant, session.id, cause)
        self._changes.pop(change, None)  # keep only the latest, in the order of time
        self._changes[change] = session, why
        self._changed.set()

    async def run(self) -> None:
        """Publish notices until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            changes, self._changes = self._changes, {}
            try:
                await self._send(changes)
            except Exception:  # the edge of this task: one failure must not stop later notices
                logger.exception("a notice could not be sent")

    async def _send(self, changes: _Changes) -> None:
        for (_, _, cause), (session, why) in changes.items():
            if cause == "saved":
                await self._saved(session)
            report = await asyncio.to_thread(self._reports.session, session)
            self._publish(Notice(cause, report or absent(session), why))


class MlxVerbs:
    """The ``SessionVerbs`` of this engine; belongs to the event loop."""

    def __init__(
        self,
        owner: Owner,
        reports: SessionReports,
        begin_to_measure: Callable[[CalibrationOrder | None], None] = lambda order: None,
    ) -> None:
        self._owner = owner
        self._begin_to_measure = begin_to_measure
        self._reports = reports
        self._hot_cache = owner.batching.hot_cache
        self._hot = owner.batching.hot_cache.sessions

    async def report(self, session: SessionRef) -> SessionReport | None:
        return await asyncio.to_thread(self._reports.session, session)

    async def sessions(self) -> list[SessionReport]:
        return await asyncio.to_thread(self._reports.sessions)

    async def stats(self) -> EngineReport:
        return await asyncio.to_thread(self._reports.engine)

    async def adopt(self) -> CodecReport:
        """Adopt the codecs that a measurement has chosen, and return the report.

        KV that was saved before stays readable; a running save ends with the old codec.
        """
        codecs, store = self._owner.codecs, self._owner.store
        if codecs and store:
            await asyncio.to_thread(codecs.renew, store.adopt)
        return self._reports.codec()

    async def measure(self, order: CalibrationOrder | None) -> CodecReport:
        """Begin to measure the codecs' cost on this model, in idle moments; return the report."""
        self._begin_to_measure(order)
        codec = self._reports.codec()
        return msgspec.structs.replace(codec, progress=codec.progress or "measuring: it begins")

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        """Limit tenants to bytes of the tiers; see ``engines.wire.LimitTenants``."""
        store = self._owner.store
        return TenantUses(await asyncio.to_thread(store.limit_tenants, tiers) if store else {})

    async def demote(self, session: SessionRef, tier: TierName | None) -> Done:
        """Drop the hot copy once there is a cold one; see ``engines.wire.Demote``."""
        store = self._owner.store
        kept: KeptReason | None = await self._cool(session) if store else "disabled"
        if not kept and store and tier:
            await asyncio.to_thread(store.demote, session, tier)
        return Done(await self.report(session), kept)

    async def _cool(self, session: SessionRef) -> KeptReason | None:
        """Drop the hot copy; return why it is still there, or None if it is not."""
        key = session.name
        # On the owner thread, where a turn ends whose end the client may have seen already.
        hot = await self._owner.call(lambda: self._candidate(key))
        if hot is None or isinstance(hot, str):
            return hot
        # asyncio.wait() does not cancel the save at its timeout.
        await asyncio.wait([asyncio.wrap_future(hot.saved)], timeout=SAVE_WAIT_S)
        return await self._owner.call(lambda: self._drop(hot))

    def _candidate(self, key: SessionName) -> HotSession | KeptReason | None:
        """Return the hot session to drop once it is saved, or why it must stay; None = not hot."""
        if self._hot.is_busy(key):
            return "busy"
        if self._hot.is_pinned(key):
            return "pinned"
        if (hot := self._hot.get(key)) is not None:
            self._hot_cache.save_again(hot)
        return hot

    def _drop(self, hot: HotSession) -> KeptReason | None:
        """Drop the session if it has not changed; return why it stays. On the owner thread."""
        if self._hot.is_busy(hot.key) or self._hot.get(hot.key) is not hot:
            return "busy"
        if not hot.is_saved:
            return "no-cold-copy" if hot.saved.done() else "saving"
        self._hot_cache.drop(hot)
        return None

    async def prefetch(self, session: SessionRef) -> Done:
        """Make the session hot, if there is room, and report on it."""
        admission, woken = self._owner.batching.admission, Future[None]()
        begin = partial(admission.prefetch, session, partial(woken.set_result, None))
        if await self._owner.call(begin):
            await asyncio.wait([asyncio.wrap_future(woken)], timeout=WAKE_WAIT_S)
        return Done(await self.report(session))

    async def pin(self, session: SessionRef, pinned: bool) -> Done:
        """Pin or unpin a session in memory and in the store."""
        known = await self.report(session)
        if known is None:
            return Done(None)
        store, key = self._owner.store, session.name
        self._hot.pin(key, pinned)
        if store:
            await asyncio.to_thread(store.pin, session, pinned)
        self._hot.pin(key, pinned)  # again: a restore may have set the pin of the older record
        return Done(await self.report(session))

    async def pin_saved(self, session: SessionRef) -> None:
        """Pin the new cold copy of a session that was pinned before it had one."""
        if (store := self._owner.store) and self._hot.is_pinned(session.name):
            await asyncio.to_thread(store.pin, session, True)

    def store_changed(self, notice: StoreNotice) -> None:
        """Report that a session's cold copy is gone, slower to reach, or smaller. Any thread."""
        session = notice.session
        if not notice.is_gone:
            self._owner.notify("moved", session, notice.why)
            return
        key = session.name
        if self._hot.get(key) is None and not self._hot.is_busy(key):
            self._hot.pin(key, False)  # neither copy is left to be pinned
        self._owner.notify("lost", session, notice.why)

    async def forget(self, session: SessionRef) -> Done:
        """Remove a session from memory and all tiers; a running turn goes on, but is not kept."""
        key = session.name
        await self._owner.call(lambda: self._owner.batching.forget(key))
        if store := self._owner.store:
            await asyncio.to_thread(store.forget, session)
            # A prefetch that began meanwhile may have read KV that the store then removed.
            await self._owner.call(lambda: self._owner.batching.forget(key))
        return Done(await self.report(session))
