"""Admits waiting requests to the batch, first come, first served, as places and memory allow.

``MemoryBudget`` decides whether there is memory for one more. Every admitted task is charged as if
it decoded already, in its future bucket, with (number of sequences) x (longest). Added to this are
the copy that is made while a sequence joins or leaves a batch, the KV of idle sessions, and the
states that running requests keep. If the sum exceeds the budget, idle sessions are dropped; if that
is not enough, the new task waits. If running sequences outgrow the budget, the youngest is sent
back: it returns to the queue, and its KV becomes an idle session.

``prefix_reuse`` finds the KV that a prompt starts from, and ``prefill`` feeds the rest. A prefetch
from the gateway makes a cold session hot before its next turn. The gateway is fair between tenants:
it sends no more turns than there are places.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from engines.config import SPARE_PLACE, EngineConfig
from engines.host.work_line import QueueLimit
from engines.http import CacheOutcome
from engines.kv_budget import KVCost, batch_bytes, passing_bytes
from engines.mlx_worker.batch.batches import Batches
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.prefix_reuse import PrefillFollowers, PrefixReuse
from engines.mlx_worker.batch.request import PrefillTask, Request
from engines.mlx_worker.generation import EventBuffer, PromptAdmitted
from engines.mlx_worker.sessions.cold_sessions import ColdPrefix, HotSession
from engines.mlx_worker.sessions.hot_sessions import HotCache, HotSessions, resolved
from kvstore.blobs.state_tree import state_nbytes
from kvstore.session import SessionName, SessionRef
from kvstore.store.restorer import Restored

# Seconds that a prompt that could run alone waits for saves to release memory.
SAVE_WAIT_S = 10.0


class MemoryBudget:
    """Compares the memory in use with the budget; it drops no sessions itself."""

    def __init__(
        self,
        config: EngineConfig,
        cost: KVCost,
        batches: Batches,
        prefiller: Prefiller,
        hot: HotSessions,
    ) -> None:
        self.hot_bytes = config.hot_bytes  # may change while requests run
        self.cost = cost
        self._places = config.max_batch + SPARE_PLACE
        self._batches = batches
        self._prefiller = prefiller
        self._hot = hot

    @property
    def has_place(self) -> bool:
        """True if one more sequence may run."""
        waiting = sum(len(task.sequences) for task in self._prefiller.admitted)
        return len(self._batches) + waiting < self._places

    def missing_for(self, task: PrefillTask) -> int:
        """Return the bytes to free before the task may be admitted; negative = to spare.

        The hot KV of the task's own session does not count, since the task starts from it.
        """
        own = self._hot.get(task.request.key) if task.request.key else None
        missing = self._missing([*self._prefiller.admitted, task])
        return missing - (own.nbytes if own else 0)

    def missing(self) -> int:
        """Return the bytes by which running and idle KV exceeds the budget; negative = to spare."""
        return self._missing(self._prefiller.admitted)

    def _missing(self, tasks: Iterable[PrefillTask]) -> int:
        shapes = self._shapes(tasks)
        running = batch_bytes(self.cost, shapes) + passing_bytes(self.cost, shapes)
        return running + self._hot.nbytes + self._state_bytes() - self.hot_bytes

    def _state_bytes(self) -> int:
        requests = {x.request for x in self._batches.sequences}
        requests |= {task.request for task in self._prefiller.admitted}
        return sum(state_nbytes(x.tree) for request in requests for x in request.taken_states)

    def _shapes(self, tasks: Iterable[PrefillTask]) -> list[tuple[int, int]]:
        """Return (sequences, longest) of each bucket, as if ``tasks`` were in it already."""
        shapes = [(len(x.sequences), x.longest) for x in self._batches.buckets]
        for task in tasks:
            index = self._batches.index_of(len(task.tokens))
            num_sequences, longest = shapes[index]
            shapes[index] = (num_sequences + len(task.sequences), max(longest, len(task.tokens)))
        return shapes


@dataclass
class _Prefetch:
    """A prefetch in progress."""

    joined: list[PrefillTask] = field(default_factory=list)  # turns that wait for it
    forgotten: bool = False  # the session was deleted meanwhile: discard the restored KV


class Admission:
    """The waiting queue, and the prefetches in progress; belongs to the owner thread."""

    def __init__(
        self,
        prefiller: Prefiller,
        batches: Batches,
        budget: MemoryBudget,
        hot_cache: HotCache,
        limit: QueueLimit,
        events: EventBuffer,
        clock: Callable[[], float],
    ) -> None:
        self._prefixes = PrefixReuse(hot_cache)
        self._prefiller = prefiller
        self._batches = batches
        self._shared = PrefillFollowers()
        self._budget = budget
        self._hot_cache = hot_cache
        self._cold = hot_cache.cold
        self._limit = limit
        self._events = events
        self._clock = clock
        self._queue: deque[PrefillTask] = deque()
        self._prefetches: dict[SessionName | None, _Prefetch] = {}
        self._blocked_since_s: float | None = None
        self.counters: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Prefill tasks in the queue."""
        return len(self._queue)

    @property
    def tasks(self) -> list[PrefillTask]:
        """All tasks that do not decode yet: in the queue, in a prefetch, or being prefilled."""
        joined = [task for x in self._prefetches.values() for task in x.joined]
        return [*self._queue, *joined, *self._prefiller.admitted]

    # ---- the queue

    def enqueue(self, task: PrefillTask) -> None:
        """Append a task to the queue, or make it wait for the prefetch of its session."""
        prefetch = self._prefetches.get(task.request.key)
        (self._queue if prefetch is None else prefetch.joined).append(task)

    def requeue(self, task: PrefillTask) -> None:
        """Put a task that ran already at the head of the queue."""
        self._queue.appendleft(task)

    def remove(self, task: PrefillTask, *, failed: bool = False) -> None:
        """Remove a task whose sequences have all ended, wherever it is.

        ``failed``: its KV cannot be used by the tasks that wait for it.
        """
        self._stop_waiting(task.request)
        if task in self._queue:
            if task is self._queue[0]:
                self._blocked_since_s = None
            self._queue.remove(task)
        for prefetch in self._prefetches.values():
            if task in prefetch.joined:
                prefetch.joined.remove(task)
        self._prefixes.cancel(task)
        self._prefiller.remove(task)
        self._shared.leave(task, usable=not failed)

    def _stop_waiting(self, request: Request) -> None:
        if request.is_waiting:
            request.is_waiting = False
            self._limit.leave()

    # ---- out of the queue

    def admit(self) -> None:
        """Admit as many tasks from the head of the queue as there is room for.

        One free place suffices for all sequences of a task, so a task with several answers need not
        wait until as many places are free.
        """
        while self._queue and self._budget.has_place and self._has_memory(self._queue[0]):
            task = self._queue.popleft()
            self._blocked_since_s = None
            self._stop_waiting(task.request)
            self._prefiller.admit(task)
            self._prefixes.find(task, partial(self._start, task))

    def _has_memory(self, task: PrefillTask) -> bool:
        own, missing = task.request.key, self._budget.missing_for(task)
        if missing <= 0 or self._hot_cache.make_room(missing, own):
            return True
        if self._prefiller.admitted or len(self._batches):
            return False
        # Nothing else runs: the task fits once all idle sessions are dropped, after their saves.
        now = self._clock()
        if self._blocked_since_s is None:
            self._blocked_since_s = now
        has_waited = now - self._blocked_since_s > SAVE_WAIT_S
        return self._hot_cache.drop_all(own, at_any_price=has_waited)

    def fed(self, task: PrefillTask) -> None:
        """Start the followers that waited for tokens which this task has now computed."""
        self._shared.fed(task)

    def _start(self, task: PrefillTask, outcome: CacheOutcome) -> None:
        """Start to prefill the task, or make it follow one with the same beginning."""
        go_on = partial(self._start, task)
        if shared := self._shared.follow(task, self._prefiller.ready, outcome, go_on):
            self._inform(task, CacheOutcome("hot", shared))
            return
        self._prefiller.start(task)
        self._count(task, outcome)
        self._inform(task, outcome)

    def _inform(self, task: PrefillTask, outcome: CacheOutcome) -> None:
        """Send the client the outcome of its first task, and again if that changes.

        A follower's client gets the expected outcome at once, since its patience is limited; the
        outcome may become less if the leader ends early.
        """
        if not task.request.admitted or task.shown not in (None, outcome):
            task.request.admitted, task.shown = True, outcome
            self._events.put(task.request.events, PromptAdmitted(outcome))

    def _count(self, task: PrefillTask, outcome: CacheOutcome) -> None:
        self.counters["prompts"] += 1
        self.counters["prompt_tokens"] += len(task.tokens)
        self.counters["cached_tokens"] += outcome.cached_tokens
        self.counters[f"source.{outcome.source}"] += 1
        if outcome.reason:
            self.counters[f"misses.{outcome.reason}"] += 1

    # ---- prefetch

    def prefetch(self, session: SessionRef, done: Callable[[], None]) -> bool:
        """Begin to make a session hot; ``done`` is called on this thread at the end.

        Returns:
            False if there is nothing to do; ``done`` is not called then.
        """
        key, hot = session.name, self._hot_cache.sessions
        if self._cold is None or key in self._prefetches or hot.get(key) or hot.is_busy(key):
            return False
        self._prefetches[key] = _Prefetch()
        self._cold.load(session, partial(self._fetched, session, done))
        return True

    def forget(self, key: SessionName) -> None:
        """Discard the KV that a running prefetch of this session will restore."""
        if (prefetch := self._prefetches.get(key)) is not None:
            prefetch.forgotten = True

    def _fetched(self, session: SessionRef, done: Callable[[], None], found: ColdPrefix) -> None:
        prefetch = self._prefetches.pop(session.name)
        try:
            if found.restored is not None and not prefetch.forgotten:
                self._keep(session, found.restored, found)
        finally:  # the turns that waited for the prefetch continue in any case
            for task in prefetch.joined:
                self.enqueue(task)
            done()

    def _keep(self, session: SessionRef, restored: Restored, found: ColdPrefix) -> None:
        count, cold = restored.num_tokens, self._cold
        missing = self._budget.missing() + self._budget.cost.row_bytes(count)
        if cold is None or (missing > 0 and not self._hot_cache.make_room(missing, None)):
            return
        if (caches := cold.rebuild(found)) is not None:
            chain = found.chain[: count // cold.store.chunk_tokens]
            hot = HotSession(session, caches, count, chain=chain)
            hot.restored_tokens = restored.lossy_tokens
            self._hot_cache.keep(hot, saved=resolved(True))
            self._hot_cache.note_restored(session)
