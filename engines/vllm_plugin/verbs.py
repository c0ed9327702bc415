"""The control verbs, as vLLM can obey them.

A session's live blocks and its stored blobs are in different processes. The blocks are looked up in
vLLM's own tables; the blobs are asked for from every rank, and the worst answer counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from engines.vllm_plugin.hot import HotSessions, Name, name_of
from engines.vllm_plugin.hub import Hub
from engines.vllm_plugin.messages import Look, RankAnswer, RankSession
from engines.wire import (
    Adopt,
    CodecReport,
    Demote,
    Done,
    EngineReport,
    Forget,
    GetStats,
    ListSessions,
    Pin,
    Prefetch,
    SessionReport,
    TierReport,
    Unpin,
    Verb,
)
from kvstore.errors import PinLimit
from kvstore.records import SessionRef, TierName
from kvstore.stats import Counters, StoreStats

LOOK_S: Final = 10.0
MOVE_S: Final = 80.0
ADOPT_S: Final = 80.0  # new kernels are compiled
SETTLE_S: Final = 5.0  # for a save that a verb would rather have behind it
HAND_OVER_S: Final = 20.0  # for one that it must; vLLM hands over with its next step
POLL_S: Final = 0.01
_ORDER: Final[list[TierName | None]] = ["ram", "disk", "redis", None]
_ONE_FOR_ALL_RANKS: Final = frozenset({"saves", "saves_skipped", "saves_failed"})


class Verbs:
    """On the hub's event loop."""

    def __init__(
        self,
        hub: Hub,
        hot: HotSessions,
        *,
        block_tokens: int,
        counters: Counters,
        num_requests: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``num_requests``: that run, and that wait."""
        self._hub = hub
        self._hot = hot
        self._block_tokens = block_tokens
        self._counters = counters
        self._num_requests = num_requests
        self._clock = clock

    async def adopt(self) -> CodecReport:
        """Each rank looks for the profile of its own share of the model."""
        return _codec([x.codec for x in await self._hub.ask(Adopt(), ADOPT_S)])

    async def codec(self) -> CodecReport:
        return _codec([x.codec for x in await self._hub.ask(GetStats(), LOOK_S)])

    async def demote(self, session: SessionRef, tier: TierName | None) -> Done:
        """vLLM reuses an idle session's blocks when it likes; this takes them away at once.

        A turn that has just ended is still being saved: demoted is what is saved by then.
        """
        name = name_of(session)
        await self._until_handed_over(name, SETTLE_S)
        found = await self._find(Look(session, settled=True), LOOK_S, name)
        kept = self._why_kept(name, found)
        if kept or found is None:
            return Done(self._report(name, found), kept)
        self._hot.ask_to_drop(name)
        if tier is not None and tier != found.tier:
            found = await self._find(Demote(session, tier), MOVE_S, name)
        return Done(self._report(name, found))

    async def _until_handed_over(self, name: Name, within_s: float) -> bool:
        """Until every rank has begun the saves that were planned for the session."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._hot.is_saving(name):
                    await asyncio.sleep(POLL_S)
                return True
        return False

    def _why_kept(self, name: Name, found: RankSession | None) -> str:
        if self._hot.is_busy(name):
            return "busy"
        if found is None:
            return "no-cold-copy" if self._hot.num_resident(name) else ""
        if found.pinned:
            return "pinned"
        return "" if found.tier else "no-cold-copy"

    async def prefetch(self, session: SessionRef) -> Done:
        """Into the fastest tier: vLLM fills blocks only for a request that runs."""
        return await self._done(Prefetch(session), session)

    async def pin(self, session: SessionRef, pinned: bool) -> Done:
        """All ranks pin it, or none: one may have no room for it, or not have the session.

        Raises ``PinLimit``.
        """
        name = name_of(session)
        await self._until_handed_over(name, SETTLE_S)
        if not pinned:
            return await self._done(Unpin(session), session)
        answers = await self._hub.ask(Pin(session), MOVE_S)
        found = _merged(answers).get(name)
        if found is None or not found.pinned:
            # No rank refuses what it had pinned before, so all of it was not.
            found = await self._find(Unpin(session), MOVE_S, name)
        if refused := next((x.pin_limit for x in answers if x.pin_limit), ""):
            raise PinLimit(refused)
        return Done(self._report(name, found))

    async def forget(self, session: SessionRef) -> Done:
        """Raises ``TimeoutError``: a save of it is still under way, and would bring it back."""
        name = name_of(session)
        if not await self._until_handed_over(name, HAND_OVER_S):
            raise TimeoutError("the session's last turn is still being saved")
        before = await self._find(Look(session), LOOK_S, name)
        report = self._report(name, before)
        await self._hub.ask(Forget(session), MOVE_S)
        self._hot.ask_to_drop(name)
        return Done(report)

    async def _done(self, verb: Verb, session: SessionRef) -> Done:
        name = name_of(session)
        return Done(self._report(name, await self._find(verb, MOVE_S, name)))

    async def sessions(self) -> list[SessionReport]:
        cold = _merged(await self._hub.ask(ListSessions(), LOOK_S))
        names = dict.fromkeys([*cold, *self._hot.names()])
        reports = [self._report(name, cold.get(name)) for name in names]
        return [x for x in reports if x is not None]

    async def look(self, session: SessionRef) -> SessionReport | None:
        name = name_of(session)
        return self._report(name, await self._find(Look(session), LOOK_S, name))

    async def stats(self) -> EngineReport:
        answers = await self._hub.ask(GetStats(), LOOK_S)
        stores = [x.stats for x in answers if x.stats is not None]
        block_bytes = self._block_tokens * self._hub.bytes_per_token
        pool = self._hot.pool
        idle, used = self._hot.num_idle_blocks(), self._hot.num_used_blocks()
        num_running, num_waiting = self._num_requests()
        return EngineReport(
            hot_bytes=min(used + idle, pool.num_gpu_blocks) * block_bytes,
            idle_hot_bytes=idle * block_bytes,
            hot_capacity_bytes=pool.num_gpu_blocks * block_bytes,
            active_bytes=0,  # weights and activations are in other processes
            num_running=num_running,
            num_waiting=num_waiting,
            save_queue_bytes=sum(x.save_queue_bytes for x in stores),
            tiers=_tiers(stores),
            counters=self._all_counters(stores),
            codec=_codec([x.codec for x in answers]),
        )

    def _all_counters(self, stores: list[StoreStats]) -> dict[str, int]:
        """By the names of every engine. A save is one, though each rank does its share; misses
        are counted once per turn, as its client was told, and not by look-ups of ranks."""
        summed = _summed([x.counters for x in stores])
        counters = {name: n for name, n in summed.items() if not name.startswith("misses.")}
        for name in counters.keys() & _ONE_FOR_ALL_RANKS:
            counters[name] = max(x.counters.get(name, 0) for x in stores)
        return counters | self._counters.as_dict()

    async def _find(self, verb: Verb | Look, deadline_s: float, name: Name) -> RankSession | None:
        return _merged(await self._hub.ask(verb, deadline_s)).get(name)

    def _report(self, name: Name, cold: RankSession | None) -> SessionReport | None:
        resident = self._hot.num_resident(name)
        idle_s = self._hot.idle_s(name)
        if cold is None and not resident and not self._hot.is_busy(name):
            return None
        tokens = resident * self._block_tokens
        if idle_s is None:
            idle_s = max(0.0, self._clock() - (cold.last_used_s if cold else self._clock()))
        return SessionReport(
            tenant=name[0],
            id=name[1],
            hot=resident > 0,
            tier=cold.tier if cold else None,
            tokens=max(tokens, cold.tokens if cold else 0),
            hot_bytes=tokens * self._hub.bytes_per_token,
            cold_bytes=cold.cold_bytes if cold else 0,
            idle_s=idle_s,
            pinned=cold.pinned if cold else False,
            busy=self._hot.is_busy(name),
        )


def _codec(ranks: list[CodecReport | None]) -> CodecReport:
    """One for the engine: that of a rank that waits for a measurement, where there is one."""
    known = [x for x in ranks if x is not None]
    return next((x for x in known if x.unmeasured), known[0] if known else CodecReport(name=""))


def _merged(answers: list[RankAnswer]) -> dict[Name, RankSession]:
    """A session is cold only where every rank has it; sizes add up, the slowest tier counts."""
    ranks = [{(x.tenant, x.id): x for x in answer.sessions} for answer in answers]
    names = set(ranks[0]).intersection(*ranks[1:]) if ranks else set()
    return {name: _one([rank[name] for rank in ranks]) for name in sorted(names)}


def _one(parts: list[RankSession]) -> RankSession:
    first = parts[0]
    return RankSession(
        first.tenant,
        first.id,
        max((x.tier for x in parts), key=_ORDER.index),
        min(x.tokens for x in parts),
        sum(x.cold_bytes for x in parts),
        max(x.last_used_s for x in parts),
        all(x.pinned for x in parts),
    )


def _summed(counters: list[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for x in counters for name in x})
    return {name: sum(x.get(name, 0) for x in counters) for name in names}


def _tiers(stores: list[StoreStats]) -> list[TierReport]:
    """The ranks' shares of each tier, added up."""
    reports: list[TierReport] = []
    for parts in zip(*(x.tiers for x in stores), strict=True):
        name: TierName = parts[0].name
        reports.append(
            TierReport(
                name,
                sum(x.nbytes for x in parts),
                sum(x.capacity_bytes for x in parts),
                sum(x.num_blobs for x in parts),
                sum(x.evictions for x in parts),
                sum(x.errors for x in parts),
                all(x.available for x in parts),
            )
        )
    return reports
