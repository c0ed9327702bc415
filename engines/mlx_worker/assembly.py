"""Puts the parts of the owner thread together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.config import EngineConfig
from engines.host.fair_shares import FairShares, length_class
from engines.host.tenant_line import QueueLimit
from engines.mlx_worker.batch.admission import Admission
from engines.mlx_worker.batch.batch_loop import BatchLoop
from engines.mlx_worker.batch.batches import Batches
from engines.mlx_worker.batch.fair_queue import FairQueue, Line
from engines.mlx_worker.batch.memory_budget import MemoryBudget, guest_places
from engines.mlx_worker.batch.prefetch import Prefetches
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.prefix_reuse import Post, PrefixReuse
from engines.mlx_worker.batch.request import PrefillTask
from engines.mlx_worker.batch.running_requests import RunningRequests
from engines.mlx_worker.batch.time_slices import TimeSlices
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.event_queue import EventBuffer
from engines.mlx_worker.sessions.cold_sessions import ColdSessions
from engines.mlx_worker.sessions.hot_cache import HotCache, Notify
from engines.mlx_worker.sessions.hot_sessions import HotSessions


@dataclass(frozen=True)
class ThreadContext:
    """The owner thread's ways in and out, for the parts that live on it."""

    events: EventBuffer
    limit: QueueLimit
    post: Post
    notify: Notify
    clock: Callable[[], float]


@dataclass(frozen=True)
class EngineParts:
    """The parts that others than the owner thread's loop ask for something."""

    loop: BatchLoop
    slices: TimeSlices
    budget: MemoryBudget
    admission: Admission
    requests: RunningRequests
    prefiller: Prefiller
    batches: Batches
    hot_cache: HotCache
    cold: ColdSessions | None
    shares: FairShares

    @property
    def counters(self) -> dict[str, int]:
        """All counts since the start. Any thread."""
        cold = dict(self.cold.counters) if self.cold else {}
        return {
            **dict(self.admission.counters),
            **cold,
            **dict(self.requests.counters),
            **dict(self.loop.counters),
            **dict(self.slices.counters),
            **dict(self.hot_cache.counters),
        }


def _snapshot_step(plan: CachePlan, cold: ColdSessions | None) -> int:
    """Tokens between places for snapshots; 0 = the caches need none."""
    if not plan.needs_state:
        return 0
    keys = cold.store.keys if cold is not None else None
    # Without rows of every token a snapshot holds nothing beside its state.
    return keys.space.chunk_tokens if keys is not None and keys.growing else 1


def assemble(
    model: Any,
    plan: CachePlan,
    cold: ColdSessions | None,
    config: EngineConfig,
    thread: ThreadContext,
) -> EngineParts:
    """Make the parts for one model. Call it on the owner thread."""
    hot = HotSessions(thread.clock)
    hot_cache = HotCache(hot, cold, thread.notify, nudge=lambda: thread.post(lambda: None))
    prefiller = Prefiller(model, config.prefill_step, _snapshot_step(plan, cold))
    batches = Batches(model, config.max_batch + guest_places(config.max_batch))
    shares = FairShares()
    queue: FairQueue[PrefillTask] = FairQueue(
        lambda x: shares.first(x, budget.places), lambda task: length_class(len(task.tokens))
    )
    budget = MemoryBudget(
        config.hot_bytes, config.max_batch, plan.cost, batches, prefiller, hot, queue
    )
    admission = Admission(
        prefixes=PrefixReuse(hot_cache, cold, thread.post),
        prefetches=Prefetches(hot_cache, cold, budget, thread.post),
        prefiller=prefiller,
        budget=budget,
        hot_cache=hot_cache,
        line=Line(queue, thread.limit),
        events=thread.events,
        clock=thread.clock,
    )
    requests = RunningRequests(hot_cache, thread.events, thread.notify, shares)
    slices = TimeSlices(shares, admission, prefiller, batches, budget, hot_cache, requests)
    loop = BatchLoop(admission, prefiller, batches, budget, hot_cache, requests, slices, shares)
    return EngineParts(
        loop, slices, budget, admission, requests, prefiller, batches, hot_cache, cold, shares
    )
