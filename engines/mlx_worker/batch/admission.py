"""Lets waiting requests into the batch, first come, first served, as places and memory allow.

No sequence enters before the memory is there for it: see ``MemoryBudget``. What a prompt starts
from is the business of ``prefix_reuse``, feeding it that of ``prefill``.
Shares between tenants are the gateway's: it sends no more turns than there are places.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from engines.host.work_line import QueueLimit
from engines.http import CacheOutcome
from engines.mlx_worker.batch.memory_budget import MemoryBudget
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.prefix_reuse import Prefetches, PrefillFollowers, PrefixReuse
from engines.mlx_worker.batch.request import PrefillTask, Request
from engines.mlx_worker.generation import EventBuffer, PromptAdmitted
from engines.mlx_worker.sessions.hot_cache import HotCache
from kvstore.session import SessionName, SessionRef

# How long a prompt that could run alone waits for saves to release memory.
SAVE_WAIT_S = 10.0


class Admission:
    """The waiting queue, and who may leave it for the batch. Belongs to the owner thread."""

    def __init__(
        self,
        prefixes: PrefixReuse,
        prefetches: Prefetches,
        prefiller: Prefiller,
        budget: MemoryBudget,
        hot_cache: HotCache,
        limit: QueueLimit,
        events: EventBuffer,
        clock: Callable[[], float],
    ) -> None:
        self._prefixes = prefixes
        self._prefetches = prefetches
        self._prefiller = prefiller
        self._shared = PrefillFollowers()
        self._budget = budget
        self._hot_cache = hot_cache
        self._limit = limit
        self._events = events
        self._clock = clock
        self._queue: deque[PrefillTask] = deque()
        self._blocked_since_s: float | None = None
        self.counters: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Prefill tasks in the queue."""
        return len(self._queue)

    @property
    def tasks(self) -> list[PrefillTask]:
        """All that do not decode yet, wherever they are."""
        return [*self._queue, *self._prefetches.joined, *self._prefiller.admitted]

    # ---- the queue

    def enqueue(self, task: PrefillTask) -> None:
        """Let a task wait for its turn, or for the prefetch of its session."""
        if not self._prefetches.join(task):
            self._queue.append(task)

    def requeue(self, task: PrefillTask) -> None:
        """Put back what ran already; it is next."""
        self._queue.appendleft(task)

    def remove(self, task: PrefillTask, *, failed: bool = False) -> None:
        """Forget a task, in line or in a batch: its sequences are all gone.

        ``failed``: its KV is of no use to those that wait for it.
        """
        self._stop_waiting(task.request)
        if task in self._queue:
            if task is self._queue[0]:
                self._blocked_since_s = None
            self._queue.remove(task)
        self._prefetches.remove(task)
        self._prefixes.cancel(task)
        self._prefiller.remove(task)
        self._shared.leave(task, usable=not failed)

    def _stop_waiting(self, request: Request) -> None:
        if request.is_waiting:
            request.is_waiting = False
            self._limit.leave()

    # ---- out of the queue

    def admit(self) -> None:
        """Let in as many tasks from the head of the queue as there is room for.

        A free place lets in all answers of a task, or those of a later one would wait for theirs.
        """
        while self._queue and self._budget.has_place and self._has_memory(self._queue[0]):
            task = self._queue.popleft()
            self._blocked_since_s = None
            self._stop_waiting(task.request)
            self._prefiller.admit(task)
            self._prefixes.find(task, partial(self._start, task))

    def _has_memory(self, task: PrefillTask) -> bool:
        own = task.request.key
        missing = self._budget.missing_for(task, own)
        if missing <= 0 or self._hot_cache.make_room(missing, own):
            return True
        if self._prefiller.num_admitted or self._budget.num_running:
            return False
        # Nothing else runs: it fits once everything idle is gone, which only waits for saves.
        now = self._clock()
        if self._blocked_since_s is None:
            self._blocked_since_s = now
        has_waited = now - self._blocked_since_s > SAVE_WAIT_S
        return self._hot_cache.drop_all(own, at_any_price=has_waited)

    def fed(self, task: PrefillTask) -> None:
        """Let the tasks go on that waited for these tokens."""
        self._shared.fed(task)

    def _start(self, task: PrefillTask, outcome: CacheOutcome) -> None:
        """Have the task fed, or let it wait for one that begins alike and is being fed."""
        go_on = partial(self._start, task)
        if shared := self._shared.follow(task, self._prefiller.ready, outcome, go_on):
            self._inform(task, CacheOutcome("hot", shared))
            return
        self._prefiller.start(task)
        self._count(task, outcome)
        self._inform(task, outcome)

    def _inform(self, task: PrefillTask, outcome: CacheOutcome) -> None:
        """Send the client the outcome of its first task, and another one if it changes.

        A follower's client does not wait for the leader, since its patience ends: the outcome that
        it gets is expected, and becomes less if the leader ends early.
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
        """Make a session hot; then ``done`` is called on this thread. False: nothing to do."""

        def go_on(joined: list[PrefillTask]) -> None:
            for task in joined:
                self.enqueue(task)
            done()

        return self._prefetches.begin(session, go_on)

    def forget(self, key: SessionName) -> None:
        """Discard the KV that a prefetch of this session restores."""
        self._prefetches.forget(key)
