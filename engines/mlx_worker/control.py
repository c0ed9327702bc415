"""The engine's end of the control connection: the gateway's verbs, reports and notices.

Verbs run on the event loop. What touches hot KV is a short command to the owner thread; what may
wait for a disk or a network runs on a thread of its own. Nothing here holds up a running sequence.
Reports are safe on any thread, and may wait for a tier.
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
# How long a demote waits for a save that is on its way before the gateway is to ask again.
SAVE_WAIT_S: Final = 5.0
# How long a prefetch may take before the caller gets an answer without it.
WAKE_WAIT_S: Final = 60.0
_NO_STORE: Final = StoreStats(
    counters={}, save_queue_bytes=0, write_queue_bytes={}, num_sessions=0, tiers=[]
)


class SessionReports:
    """Writes reports from the hot sessions and from the store's records."""

    def __init__(
        self, owner: Owner, measuring: Callable[[CodecReport], CodecReport] = lambda report: report
    ) -> None:
        """``measuring`` adds what is to be said of a measurement of the model."""
        self._owner = owner
        self._measuring = measuring
        self._hot = owner.batching.hot_cache.sessions
        self._store = owner.store

    def session(self, session: SessionRef) -> SessionReport | None:
        """The report on one session; None if neither the engine nor the store knows it."""
        record = self._store.record(session) if self._store else None
        return self._report(session.name, record)

    def sessions(self) -> list[SessionReport]:
        """The reports on all sessions, hot and cold. Blocks until those on Redis are known."""
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
        """The report on the engine: memory in use, queues, tiers, counts since the start."""
        owner, batching = self._owner, self._owner.batching
        store = self._store.stats() if self._store else _NO_STORE
        active, measured = mx.get_active_memory(), owner.held.nbytes if owner.held else 0
        # Misses are those that were reported to clients; the store counts look-ups.
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
        """The report on the codecs that pack cold KV."""
        if (codecs := self._owner.codecs) is not None:
            return self._measuring(codecs.report)
        return CodecReport(name="none", why=self._owner.facts.hibernation_reason)


class Notifier:
    """Turns changes of sessions into notices. Changes that come close together share a report."""

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
        """Note a change. Called on the event loop."""
        change = (session.tenant, session.id, cause)
        self._changes.pop(change, None)  # the latest of its kind, in its place in time
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
            except Exception:  # the edge of this task: later notices matter more than this one
                logger.exception("a notice could not be written")

    async def _send(self, changes: _Changes) -> None:
        for (_, _, cause), (session, why) in changes.items():
            if cause == "saved":
                await self._saved(session)
            report = await asyncio.to_thread(self._reports.session, session)
            self._publish(Notice(cause, report or absent(session), why))


class MlxVerbs:
    """The verbs of ``engines.host.control_server``. Belongs to the event loop."""

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
        """Take over new codecs, if a measurement found some.

        KV that was saved before stays readable; a save that is under way ends as it began.
        """
        codecs, store = self._owner.codecs, self._owner.store
        if codecs and store:
            await asyncio.to_thread(codecs.renew, store.adopt)
        return self._reports.codec()

    async def measure(self, order: CalibrationOrder | None) -> CodecReport:
        """Begin to measure what the codecs cost this model, in idle moments."""
        self._begin_to_measure(order)
        codec = self._reports.codec()
        return msgspec.structs.replace(codec, progress=codec.progress or "measuring: it begins")

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        """Hold tenants to bytes of the tiers; see ``engines.wire.LimitTenants``."""
        store = self._owner.store
        return TenantUses(await asyncio.to_thread(store.limit_tenants, tiers) if store else {})

    async def demote(self, session: SessionRef, tier: TierName | None) -> Done:
        """Drop the hot copy once there is a cold one; ``tier`` also moves the cold copy down."""
        store = self._owner.store
        kept: KeptReason | None = await self._cool(session) if store else "disabled"
        if not kept and store and tier:
            await asyncio.to_thread(store.demote, session, tier)
        return Done(await self.report(session), kept)

    async def _cool(self, session: SessionRef) -> KeptReason | None:
        """Drop the hot copy. Returns why it is still there, None if it is not."""
        key = session.name
        # On the owner thread, because a turn whose end the client has just seen ends there.
        hot = await self._owner.call(lambda: self._candidate(key))
        if hot is None or isinstance(hot, str):
            return hot
        # wait(), because its time limit does not cancel the save.
        await asyncio.wait([asyncio.wrap_future(hot.saved)], timeout=SAVE_WAIT_S)
        return await self._owner.call(lambda: self._drop(hot))

    def _candidate(self, key: SessionName) -> HotSession | KeptReason | None:
        """The hot session, which may go once it is saved; or why it may not; None = not hot."""
        if self._hot.is_busy(key):
            return "busy"
        if self._hot.is_pinned(key):
            return "pinned"
        if (hot := self._hot.get(key)) is not None:
            self._hot_cache.save_again(hot)
        return hot

    def _drop(self, hot: HotSession) -> KeptReason | None:
        """Drop it unless something changed. On the owner thread, so nothing comes in between."""
        if self._hot.is_busy(hot.key) or self._hot.get(hot.key) is not hot:
            return "busy"
        if not hot.is_saved:
            return "no-cold-copy" if hot.saved.done() else "saving"
        self._hot_cache.drop(hot)
        return None

    async def prefetch(self, session: SessionRef) -> Done:
        """Make the session hot, as far as there is room, and report on it."""
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
        self._hot.pin(key, pinned)  # a restore may have brought the record's older pin
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
            self._hot.pin(key, False)  # nothing is left that the pin could hold
        self._owner.notify("lost", session, notice.why)

    async def forget(self, session: SessionRef) -> Done:
        """Remove a session from memory and every tier. A running turn goes on and is not kept."""
        key = session.name
        await self._owner.call(lambda: self._owner.batching.forget(key))
        if store := self._owner.store:
            await asyncio.to_thread(store.forget, session)
            # A prefetch may have begun meanwhile, and read what the store had not removed yet.
            await self._owner.call(lambda: self._owner.batching.forget(key))
        return Done(await self.report(session))
