"""Reports on the sessions and on the engine. Safe on any thread; may wait for a tier."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import mlx.core as mx

from engines.mlx_worker.owner import Owner
from engines.mlx_worker.sessions.hot_cache import Cause
from engines.mlx_worker.sessions.hot_sessions import HotSession, SessionKey
from engines.wire import (
    CodecReport,
    EngineReport,
    Notice,
    RequestProgress,
    SessionReport,
    TierReport,
    absent,
)
from kvstore.session import SessionRef, TierName
from kvstore.stats import Repacking, StoreStats
from kvstore.store.records import SessionRecord
from kvstore.tiers.base import TierStats

logger = logging.getLogger(__name__)
_Changes: TypeAlias = dict[tuple[str, str, Cause], tuple[SessionRef, str]]


class SessionReports:
    """Writes reports from the hot sessions and from the store's records."""

    def __init__(
        self,
        owner: Owner,
        wall_clock: Callable[[], float] = time.time,
        measuring: Callable[[CodecReport], CodecReport] = lambda report: report,
    ) -> None:
        """``measuring`` adds what is to be said of a measurement of the model."""
        self._owner = owner
        self._measuring = measuring
        self._hot = owner.parts.hot_cache.sessions
        self._store = owner.store
        self._wall_clock = wall_clock

    def session(self, session: SessionRef) -> SessionReport | None:
        """The report on one session; None if neither the engine nor the store knows it."""
        record = self._store.record(session) if self._store else None
        return self._report((session.tenant, session.id), record)

    def sessions(self) -> list[SessionReport]:
        """The reports on all sessions, hot and cold."""
        records = {(x.tenant, x.id): x for x in (self._store.records() if self._store else [])}
        keys = dict.fromkeys([*records, *(x.key for x in self._hot.all()), *self._hot.busy()])
        reports = (self._report(key, records.get(key)) for key in keys)
        return [x for x in reports if x is not None]

    def _report(self, key: SessionKey, record: SessionRecord | None) -> SessionReport | None:
        hot, busy_tokens = self._hot.get(key), self._hot.busy_tokens(key)
        if hot is None and record is None and not busy_tokens:
            return None
        cold_tokens = record.num_tokens if record else 0
        running_bytes = self._owner.sequence_bytes(busy_tokens) if busy_tokens else 0
        return SessionReport(
            tenant=key[0],
            id=key[1],
            hot=hot is not None or busy_tokens > 0,
            tier=self._tier(record),
            tokens=len(hot.tokens) if hot else busy_tokens or cold_tokens,
            hot_bytes=hot.nbytes if hot else running_bytes,
            cold_bytes=record.packed_bytes if record else 0,
            idle_s=0.0 if busy_tokens else self._idle_s(hot, record),
            pinned=self._hot.is_pinned(key) or (record is not None and record.pinned),
            busy=busy_tokens > 0,
            cold_tokens=cold_tokens,
        )

    def _tier(self, record: SessionRecord | None) -> TierName | None:
        return self._store.tier_of(record) if self._store and record else None

    def _idle_s(self, hot: HotSession | None, record: SessionRecord | None) -> float:
        if hot is not None:
            return self._hot.idle_s(hot)
        return max(0.0, self._wall_clock() - record.last_used_s) if record else 0.0

    # ---- the engine

    def engine(self) -> EngineReport:
        """The report on the engine: memory in use, queues, tiers, counts since the start."""
        parts, store = self._owner.parts, self._store.stats() if self._store else None
        active = mx.get_active_memory()
        return EngineReport(
            hot_bytes=max(0, active - self._owner.weight_bytes - self._measured_bytes()),
            idle_hot_bytes=self._hot.nbytes,
            hot_capacity_bytes=self._owner.hot_capacity_bytes,
            active_bytes=active,
            num_running=len(parts.batches) + parts.prefiller.num_admitted,
            num_waiting=self._owner.num_waiting,
            save_queue_bytes=store.save_queue_bytes if store else 0,
            tiers=[_tier_report(x) for x in store.tiers] if store else [],
            counters=self._counters(store),
            codec=self.codec(),
            requests=self._requests(),
            repacking=store.repacking if store else Repacking(),
            members=store.members if store else None,
        )

    def _requests(self) -> list[RequestProgress]:
        """The progress of all requests of sessions, as far as it can be seen from this thread."""
        parts = self._owner.parts
        found = []
        for request in parts.requests.all():
            if request.key is None or request.is_waiting:
                continue
            prompt = len(request.generation.prompt)
            answered = sum(len(x.tokens) - prompt for x in list(request.sequences))
            prefilled = min(prompt, request.num_fed)
            found.append(RequestProgress(*request.key, prompt, prefilled, max(0, answered)))
        return found

    def codec(self) -> CodecReport:
        """The report on the codecs that pack cold KV."""
        if (codecs := self._owner.codecs) is not None:
            return self._measuring(codecs.report)
        return CodecReport(name="none", why=self._owner.facts.hibernation_reason)

    def _measured_bytes(self) -> int:
        """Bytes of live KV that belong to no session: a measurement's."""
        return self._owner.held.nbytes if self._owner.held else 0

    def _counters(self, store: StoreStats | None) -> dict[str, int]:
        """All counts. Misses are those that were reported to clients; the store counts look-ups."""
        stored = store.counters if store else {}
        return {
            **{name: count for name, count in stored.items() if not name.startswith("misses.")},
            **self._owner.parts.counters,
        }


def _tier_report(stats: TierStats) -> TierReport:
    name: TierName = stats.name  # type: ignore[assignment]  # of our own three
    return TierReport(
        name,
        stats.nbytes,
        stats.capacity_bytes,
        stats.num_blobs,
        stats.evictions,
        stats.errors,
        stats.available,
    )


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

    def hear(self, cause: Cause, session: SessionRef, why: str = "") -> None:
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
