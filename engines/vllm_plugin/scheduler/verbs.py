"""Carries out the gateway's control verbs on vLLM.

A session's live blocks and its stored blobs are in different processes. The blocks are looked up in
vLLM's own tables. Every rank is asked about the blobs, and the answer of the rank with the fewest
tokens counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import msgspec

from engines.config import CalibrationOrder
from engines.vllm_plugin.messages import Look, RankAnswer
from engines.vllm_plugin.scheduler.hub import Hub
from engines.vllm_plugin.scheduler.request_tracker import RequestTracker
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.wire import (
    Adopt,
    CodecReport,
    Demote,
    Done,
    EngineReport,
    Forget,
    GetStats,
    KeptReason,
    LimitTenants,
    ListSessions,
    Measure,
    Pin,
    Prefetch,
    SessionReport,
    TenantUses,
    TierStats,
    Unpin,
    absent,
)
from kvstore.session import TIER_NAMES, SessionName, SessionRef, TenantLimits, TierName
from kvstore.stats import Counters, Repacking, StoreStats

LOOK_S: Final = 10.0
MOVE_S: Final = 80.0
ADOPT_S: Final = 80.0  # new kernels are compiled
SETTLE_S: Final = 5.0  # for a save that should end before the verb is carried out
HAND_OVER_S: Final = 20.0  # for a save that must; vLLM passes it to the workers in its next step
# The wait until readers of KV events were informed that the session is stored, before its blocks
# are reported as removed.
REPORTED_S: Final = 1.0
POLL_S: Final = 0.01
_ORDER: Final[list[TierName | None]] = [*TIER_NAMES, None]
AboutSession: TypeAlias = Demote | Prefetch | Pin | Unpin | Look
_ONE_FOR_ALL_RANKS: Final = frozenset({"saves", "saves_skipped", "saves_failed"})


class VllmVerbs:
    """Implements ``SessionVerbs`` for a vLLM engine. On the hub's event loop.

    Every verb raises the errors of ``Hub.ask``.
    """

    def __init__(
        self,
        hub: Hub,
        resident: ResidentSessions,
        tracker: RequestTracker,
        *,
        block_tokens: int,
        counters: Counters,
        is_reported: Callable[[SessionName], bool],
    ) -> None:
        """``is_reported``: all readers of KV events, if any, know the session's tiers."""
        self._hub = hub
        self._resident = resident
        self._block_tokens = block_tokens
        self._counters = counters
        self._tracker = tracker
        self._is_reported = is_reported

    async def adopt(self) -> CodecReport:
        """Make every rank adopt the codec that the profile of its share of the model allows."""
        return _codec([x.codec for x in await self._hub.ask(Adopt(), ADOPT_S)])

    async def measure(self, order: CalibrationOrder | None) -> CodecReport:
        """Start a measurement of the codecs' errors on every rank's share, in idle moments."""
        codec = _codec([x.codec for x in await self._hub.ask(Measure(order), LOOK_S)])
        return msgspec.structs.replace(codec, progress=codec.progress or "measuring: it begins")

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        """Limit tenants to bytes of the tiers, summed over all ranks."""
        num_ranks = self._hub.num_ranks
        each = LimitTenants({name: _divided(x, num_ranks) for name, x in tiers.items()})
        answers = await self._hub.ask(each, LOOK_S)
        known = [x for x in TIER_NAMES if all(x in y.tenants for y in answers)]
        return TenantUses({name: _summed([x.tenants[name] for x in answers]) for name in known})

    async def codec(self) -> CodecReport:
        """The codec in use."""
        return _codec([x.codec for x in await self._hub.ask(GetStats(), LOOK_S)])

    async def demote(self, session: SessionRef, tier: TierName | None) -> Done:
        """Drop the session's live blocks now, and move its blobs to ``tier`` if one is named.

        Without this verb vLLM keeps an idle session's blocks until it needs them. A turn that has
        just ended is still being saved, so this waits for saves under way, but not for long: then
        the gateway is to ask again.
        """
        name = session.name
        handed_over = await self._until_handed_over(name, SETTLE_S)
        answers = await self._hub.ask(Look(session, settled=True), LOOK_S)
        found = _merged(answers).get(name)
        kept = self._why_kept(name, found, handed_over and all(x.settled for x in answers))
        if kept or found is None:
            return self._done(session, found, kept)
        await self._until(lambda: self._is_reported(name), REPORTED_S)
        self._resident.ask_to_drop(name)
        if tier is not None and tier != found.tier:
            found = await self._find(Demote(session, tier))
        return self._done(session, found)

    async def _until_handed_over(self, name: SessionName, within_s: float) -> bool:
        """Wait for the ranks to begin the session's planned saves; False after ``within_s``."""
        return await self._until(lambda: not self._resident.is_saving(name), within_s)

    async def _until(self, is_so: Callable[[], bool], within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not is_so():
                    await asyncio.sleep(POLL_S)
                return True
        return False

    def _why_kept(
        self, name: SessionName, found: SessionReport | None, settled: bool
    ) -> KeptReason | None:
        if self._resident.is_busy(name):
            return "busy"
        if not settled and not (found is not None and found.pinned):
            return "saving"
        if found is None:
            return "no-cold-copy" if self._resident.num_resident(name) else None
        if found.pinned:
            return "pinned"
        return None if found.tier else "no-cold-copy"

    async def prefetch(self, session: SessionRef) -> Done:
        """Bring the blobs to the fastest tier; vLLM fills blocks only for a running request."""
        return self._done(session, await self._find(Prefetch(session)))

    async def pin(self, session: SessionRef, pinned: bool) -> Done:
        """Pin or unpin the session on all ranks, or on none.

        A rank may not have the session.
        """
        await self._until_handed_over(session.name, SETTLE_S)
        found = await self._find(Pin(session)) if pinned else None
        if found is None or not found.pinned:
            found = await self._find(Unpin(session))
        return self._done(session, found)

    async def forget(self, session: SessionRef) -> Done:
        """Delete the session everywhere and return its last report.

        Raises ``TimeoutError``: a save of it is still under way, and would bring it back.
        """
        if not await self._until_handed_over(session.name, HAND_OVER_S):
            raise TimeoutError("the session's last turn is still being saved")
        last = self._done(session, await self._find(Look(session), LOOK_S))
        await self._hub.ask(Forget(session), MOVE_S)
        self._resident.ask_to_drop(session.name)
        return last

    def _done(
        self, session: SessionRef, found: SessionReport | None, kept: KeptReason | None = None
    ) -> Done:
        return Done(self._report(session.name, found), kept)

    async def sessions(self) -> list[SessionReport]:
        """All sessions that have a cold copy or live blocks."""
        cold = _merged(await self._hub.ask(ListSessions(), LOOK_S))
        names = dict.fromkeys([*cold, *self._resident.names()])
        reports = [self._report(name, cold.get(name)) for name in names]
        return [x for x in reports if x is not None]

    async def look(self, session: SessionRef) -> SessionReport | None:
        """The session's report; None if it has no live blocks, no cold copy and no request."""
        return self._report(session.name, await self._find(Look(session), LOOK_S))

    async def stats(self) -> EngineReport:
        """The sums of counters, queues and tiers over all ranks."""
        answers = await self._hub.ask(GetStats(), LOOK_S)
        stores = [x.stats for x in answers if x.stats is not None]
        block_bytes = self._block_tokens * self._hub.bytes_per_token
        pool = self._resident.pool
        idle, used = self._resident.num_idle_blocks(), self._resident.num_used_blocks()
        return EngineReport(
            hot_bytes=min(used + idle, pool.num_gpu_blocks) * block_bytes,
            idle_hot_bytes=idle * block_bytes,
            hot_capacity_bytes=pool.num_gpu_blocks * block_bytes,
            active_bytes=0,  # weights and activations are in other processes
            num_running=self._tracker.num_running,
            num_waiting=self._tracker.num_waiting,
            save_queue_bytes=sum(x.save_queue_bytes for x in stores),
            tiers=_tiers(stores),
            counters=self._all_counters(stores),
            codec=_codec([x.codec for x in answers]),
            requests=self._tracker.progress(),
            repacking=_repacking([x.repacking for x in stores]),
            differs=tuple(sorted({kind for x in stores for kind in x.differs})),
        )

    def _all_counters(self, stores: list[StoreStats]) -> dict[str, int]:
        """The counters under the names that every engine uses.

        A save counts once, although each rank saves its share. Misses are counted once per turn, as
        reported to its client; the ranks' own counts of lookups are left out.
        """
        summed = _summed([x.counters for x in stores])
        counters = {name: n for name, n in summed.items() if not name.startswith("misses.")}
        for name in counters.keys() & _ONE_FOR_ALL_RANKS:
            counters[name] = max(x.counters.get(name, 0) for x in stores)
        return counters | self._counters.as_dict()

    async def _find(self, verb: AboutSession, deadline_s: float = MOVE_S) -> SessionReport | None:
        """Have the ranks carry out the verb; return the session's joint report after it."""
        return _merged(await self._hub.ask(verb, deadline_s)).get(verb.session.name)

    def _report(self, name: SessionName, cold: SessionReport | None) -> SessionReport | None:
        """Add what vLLM itself holds of a session; None if there is nothing of it anywhere."""
        resident, is_busy = self._resident.num_resident(name), self._resident.is_busy(name)
        if cold is None and not resident and not is_busy:
            return None
        cold = cold or absent(SessionRef(*name, b""))
        idle_s, tokens = self._resident.idle_s(name), resident * self._block_tokens
        return msgspec.structs.replace(
            cold,
            hot=resident > 0,
            tokens=max(tokens, cold.tokens),
            hot_bytes=tokens * self._hub.bytes_per_token,
            idle_s=cold.idle_s if idle_s is None else idle_s,
            busy=is_busy,
        )


def _divided(limits: TenantLimits, num_ranks: int) -> TenantLimits:
    """Return the limits of one rank; ranks hold equal parts of every session."""

    def part(nbytes: int | None) -> int | None:
        return None if nbytes is None else nbytes // num_ranks

    named = {tenant: part(nbytes) for tenant, nbytes in limits.named.items()}
    return TenantLimits(named, part(limits.others))


def _codec(ranks: list[CodecReport | None]) -> CodecReport:
    """The engine's codec: that of a rank that waits for a measurement, if any, else the first.

    A measurement runs until every rank has ended it.
    """
    known = [x for x in ranks if x is not None]
    found = next((x for x in known if x.unmeasured), known[0] if known else CodecReport(name=""))
    why_host = next((x.why_host for x in known if x.why_host), "")
    progress = next((x.progress for x in (found, *known) if x.progress), "")
    return msgspec.structs.replace(found, why_host=why_host, progress=progress)


def _merged(answers: list[RankAnswer]) -> dict[SessionName, SessionReport]:
    """The sessions that every rank has; sizes add up, and the slowest tier counts."""
    ranks = [{(x.tenant, x.id): x for x in answer.sessions} for answer in answers]
    names = set(ranks[0]).intersection(*ranks[1:]) if ranks else set()
    return {name: _joint([rank[name] for rank in ranks]) for name in sorted(names)}


def _joint(shares: list[SessionReport]) -> SessionReport:
    """Join the ranks' shares of a session into one."""
    tokens = min(x.tokens for x in shares)
    return msgspec.structs.replace(
        shares[0],
        tier=max((x.tier for x in shares), key=_ORDER.index),
        tokens=tokens,
        cold_tokens=tokens,
        cold_bytes=sum(x.cold_bytes for x in shares),
        idle_s=min(x.idle_s for x in shares),
        pinned=all(x.pinned for x in shares),
    )


def _summed(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Add up the ranks' counts of each name."""
    names = sorted({name for x in ranks for name in x})
    return {name: sum(x.get(name, 0) for x in ranks) for name in names}


def _repacking(shares: list[Repacking]) -> Repacking:
    """Join the ranks' shares: bytes add up, and a session counts once."""
    return Repacking(
        max((x.sessions_left for x in shares), default=0),
        sum(x.bytes_left for x in shares),
        max((x.sessions_done for x in shares), default=0),
        sum(x.freed_bytes for x in shares),
    )


def _tiers(stores: list[StoreStats]) -> list[TierStats]:
    """The sums of the ranks' shares of each tier."""
    by_tier = zip(*(x.tiers for x in stores), strict=True)
    return [TierStats.joined(x, available=all(y.available for y in x)) for x in by_tier]
