"""Carries out the gateway's control verbs on the hot sessions and on the cold store.

Runs on the event loop. What touches hot KV is a short command to the owner thread; what may wait
for a disk or a network runs on a thread of its own. Nothing here holds up a running sequence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from engines.config import CalibrationOrder
from engines.mlx_worker.control.reports import SessionReports
from engines.mlx_worker.owner import Owner
from engines.mlx_worker.sessions.hot_sessions import HotSession, SessionKey
from engines.wire import CodecReport, Done, EngineReport, SessionReport, TenantUses
from kvstore.errors import PinLimit
from kvstore.ledger.notices import StoreNotice
from kvstore.session import SessionRef, TierName
from kvstore.tenant_bytes import TenantLimits

logger = logging.getLogger(__name__)

# How long a demote waits for a save that is on its way.
SAVE_WAIT_S: Final = 30.0
# How long smaller budgets are waited for before the gateway is to ask again, and how often it is
# looked whether they hold.
SHRINK_WAIT_S: Final = 20.0
SHRINK_LOOK_S: Final = 0.1
# How long a prefetch may take before the caller gets an answer without it.
WAKE_WAIT_S: Final = 60.0


class MlxVerbs:
    """The verbs of ``engines.host.control_server``. Belongs to the event loop."""

    def __init__(
        self,
        owner: Owner,
        reports: SessionReports,
        begin_to_measure: Callable[[CalibrationOrder | None], None] = lambda order: None,
    ) -> None:
        self._owner = owner
        self._clock = time.monotonic
        self._begin_to_measure = begin_to_measure
        self._reports = reports
        self._hot_cache = owner.parts.hot_cache
        self._hot = owner.parts.hot_cache.sessions

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

    async def set_budgets(self, hot_bytes: int, ram_bytes: int) -> None:
        """Hold to other budgets, never below those of the start; see ``engines.wire.SetBudgets``.

        What is more than they allow goes as under any pressure: sessions that are saved leave, and
        of running ones the youngest waits in line again.
        """
        hot_bytes = max(hot_bytes, self._owner.least_hot_bytes)
        if store := self._owner.store:
            await asyncio.to_thread(store.resize_memory, ram_bytes)
        until = self._clock() + SHRINK_WAIT_S
        while not await self._owner.call(lambda: self._holds_to(hot_bytes)):
            if self._clock() > until:
                raise TimeoutError("more than the new budget is still in use; ask again")
            await asyncio.sleep(SHRINK_LOOK_S)

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        """Hold tenants to bytes of the tiers; see ``engines.wire.LimitTenants``."""
        store = self._owner.store
        return TenantUses(await asyncio.to_thread(store.limit_tenants, tiers) if store else {})

    def _holds_to(self, hot_bytes: int) -> bool:
        """Take a budget over, and make room for it. On the owner thread."""
        budget = self._owner.parts.budget
        budget.hot_bytes = hot_bytes
        missing = budget.missing()
        return missing <= 0 or self._hot_cache.make_room(missing, None)

    async def demote(self, session: SessionRef, tier: TierName | None) -> Done:
        """Drop the hot copy once there is a cold one; ``tier`` also moves the cold copy down."""
        store = self._owner.store
        kept = await self._cool(session) if store else "disabled"
        if not kept and store and tier:
            await asyncio.to_thread(store.demote, session, tier)
        return Done(await self.report(session), kept)

    async def _cool(self, session: SessionRef) -> str:
        """Drop the hot copy. Returns "", or why it is still there."""
        key = (session.tenant, session.id)
        # On the owner thread, because a turn whose end the client has just seen ends there.
        hot = await self._owner.call(lambda: self._candidate(key))
        if hot is None or isinstance(hot, str):
            return hot or ""
        # wait(), because its time limit does not cancel the save.
        await asyncio.wait([asyncio.wrap_future(hot.saved)], timeout=SAVE_WAIT_S)
        return await self._owner.call(lambda: self._drop(hot))

    def _candidate(self, key: SessionKey) -> HotSession | str | None:
        """The hot session, which may go once it is saved; or why it may not; None = not hot."""
        if self._hot.is_busy(key):
            return "busy"
        if self._hot.is_pinned(key):
            return "pinned"
        if (hot := self._hot.get(key)) is not None:
            self._hot_cache.save_again(hot)
        return hot

    def _drop(self, hot: HotSession) -> str:
        """Drop it unless something changed. On the owner thread, so nothing comes in between."""
        if self._hot.is_busy(hot.key) or self._hot.get(hot.key) is not hot:
            return "busy"
        if not hot.is_saved:
            return "no-cold-copy"
        self._hot_cache.drop(hot)
        return ""

    async def prefetch(self, session: SessionRef) -> Done:
        """Make the session hot, as far as there is room, and report on it."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def done() -> None:
            loop.call_soon_threadsafe(woken.set)

        if await self._owner.call(lambda: self._owner.parts.admission.prefetch(session, done)):
            await asyncio.wait([asyncio.ensure_future(woken.wait())], timeout=WAKE_WAIT_S)
        return Done(await self.report(session))

    async def pin(self, session: SessionRef, pinned: bool) -> Done:
        """Pin or unpin a session in memory and in the store. Raises ``PinLimit``."""
        known = await self.report(session)
        if known is None:
            return Done(None)
        store, key = self._owner.store, (session.tenant, session.id)
        self._hot.pin(key, pinned)
        if store:
            try:
                await asyncio.to_thread(store.pin, session, pinned)
            except PinLimit:
                self._hot.pin(key, known.pinned)
                raise
        self._hot.pin(key, pinned)  # a restore may have brought the record's older pin
        return Done(await self.report(session))

    async def pin_saved(self, session: SessionRef) -> None:
        """Pin the new cold copy of a session that was pinned before it had one."""
        if (store := self._owner.store) and self._hot.is_pinned((session.tenant, session.id)):
            try:
                await asyncio.to_thread(store.pin, session, True)
            except PinLimit as error:
                logger.warning("a session that was to be pinned is not: %s", error)
                self._hot.pin((session.tenant, session.id), False)

    def store_changed(self, notice: StoreNotice) -> None:
        """Report that a session's cold copy is gone, found, or slower to reach. Any thread."""
        session = notice.session
        if not notice.is_gone:
            self._owner.notify("moved", session, notice.why)
            return
        key = (session.tenant, session.id)
        if self._hot.get(key) is None and not self._hot.is_busy(key):
            self._hot.pin(key, False)  # nothing is left that the pin could hold
        self._owner.notify("lost", session, notice.why)

    def packed(self, session: SessionRef) -> None:
        """Note that a session's cold copy takes less room than before. Any thread."""
        self._owner.notify("packed", session)

    async def forget(self, session: SessionRef) -> Done:
        """Remove a session from memory and every tier. A running turn goes on and is not kept."""
        key = (session.tenant, session.id)
        await self._owner.call(lambda: self._owner.parts.loop.forget(key))
        if store := self._owner.store:
            await asyncio.to_thread(store.forget, session)
            # A prefetch may have begun meanwhile, and read what the store had not removed yet.
            await self._owner.call(lambda: self._owner.parts.loop.forget(key))
        return Done(await self.report(session))
