"""Lets waiting requests into the batch, as slots and memory allow, fair between tenants.

No sequence enters before the memory is there for it: see ``MemoryBudget``. What a prompt starts
from is ``prefix_reuse``'s business, feeding it ``prefill``'s.

The tenant that was served least is next, and within a tenant its sessions take turns, short prompts
a little before long ones (``engines.host.fair_shares``). A tenant with a hundred requests delays
another's single one by one request, not by a hundred.

Who ran already and had to make way waits before the others of its own tenant, not of all; and of
every four of a tenant one is let in that has not begun, however many take turns with its rows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from engines.host.fair_shares import FRESH_EVERY, QueueLimit, next_of
from engines.http import CacheOutcome
from engines.mlx_worker.batch.batches import MemoryBudget
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.prefix_reuse import Prefetches, PrefixReuse
from engines.mlx_worker.batch.request import PrefillTask, Request
from engines.mlx_worker.generation import EventBuffer, PromptAdmitted
from engines.mlx_worker.sessions.hot_cache import HotCache
from kvstore.session import SessionName, SessionRef

T = TypeVar("T")
# How long a prompt that could run alone waits for saves to release memory.
SAVE_WAIT_S = 10.0


class _Tenant(Generic[T]):
    """All that waits of one tenant."""

    def __init__(self, length: Callable[[T], int]) -> None:
        self._length = length
        self._num_begun = 0
        self._num_back = 0  # of those that ran already, let in since one began
        self.back: deque[T] = deque()  # ran already; the one that made way first is first
        self.sessions: dict[str, deque[T]] = {}  # the one that had no turn for longest is first

    def queues(self) -> Iterable[deque[T]]:
        return (self.back, *self.sessions.values())

    def head(self) -> T:
        return self.back[0] if self._goes_back else self._fresh()

    @property
    def _goes_back(self) -> bool:
        return bool(self.back) and (not self.sessions or self._num_back < FRESH_EVERY - 1)

    def _fresh(self) -> T:
        return self.sessions[self._next_session()][0]

    def take(self, item: T) -> bool:
        """Take out an item; of those that may be next the tenant's turns are counted."""
        if self.back and self.back[0] is item:
            self._pop_back()
        elif self.sessions and self._fresh() is item:
            self._pop_fresh()
        else:
            return self.remove(item)
        return True

    def _pop_back(self) -> T:
        self._num_back += 1
        return self.back.popleft()

    def _pop_fresh(self) -> T:
        session = self._next_session()
        self._num_begun += 1
        self._num_back = 0
        queue = self.sessions.pop(session)
        item = queue.popleft()
        if queue:
            self.sessions[session] = queue
        return item

    def _next_session(self) -> str:
        def length(session: str) -> int:
            return self._length(self.sessions[session][0])

        return next_of(list(self.sessions), length, self._num_begun)

    def remove(self, item: T) -> bool:
        for queue in self.queues():
            if item in queue:
                queue.remove(item)
                self.sessions = {name: x for name, x in self.sessions.items() if x}
                return True
        return False

    def __len__(self) -> int:
        return sum(len(queue) for queue in self.queues())


class FairQueue(Generic[T]):
    """One queue per tenant and session, served in turns. Belongs to the owner thread."""

    def __init__(
        self,
        first: Callable[[Iterable[str]], str],
        length: Callable[[T], int],
    ) -> None:
        """Make an empty one.

        Args:
            first: chooses among the tenants that wait, the longest-waiting first.
            length: of an item, as ``fair_shares.length_class`` groups them.
        """
        self._first = first
        self._length = length
        self._tenants: dict[str, _Tenant[T]] = {}

    def __len__(self) -> int:
        return sum(len(x) for x in self._tenants.values())

    def items(self) -> list[T]:
        """Everything that waits, in no order that matters."""
        return [x for tenant in self._tenants.values() for queue in tenant.queues() for x in queue]

    def push(self, item: T, tenant: str, session: str) -> None:
        """Append ``item`` to the queue of its tenant and session."""
        self._of(tenant).sessions.setdefault(session, deque()).append(item)

    def push_back(self, item: T, tenant: str) -> None:
        """Put ``item``, which ran already, before all of its tenant that did not."""
        self._of(tenant).back.append(item)

    def _of(self, tenant: str) -> _Tenant[T]:
        return self._tenants.setdefault(tenant, _Tenant(self._length))

    def head(self) -> T | None:
        """The next item; stays the same until it is taken, or one comes that goes before it."""
        if not self._tenants:
            return None
        return self._tenants[self._first(self._tenants)].head()

    def heads(self) -> list[T]:
        """The next item of each tenant."""
        return [tenant.head() for tenant in self._tenants.values()]

    def take(self, item: T) -> bool:
        """Take out ``item``, a head of its tenant; False if it is gone.

        Its tenant and its session go to the back.
        """
        for name, tenant in self._tenants.items():
            if tenant.take(item):
                del self._tenants[name]
                if len(tenant):
                    self._tenants[name] = tenant
                return True
        return False

    def remove(self, item: T) -> bool:
        """Remove ``item`` from its line; returns False if it does not wait here."""
        for name, tenant in self._tenants.items():
            if tenant.remove(item):
                if not len(tenant):
                    del self._tenants[name]
                return True
        return False


class Line(NamedTuple, Generic[T]):
    """The queue, and the limit on the requests that wait in it."""

    queue: FairQueue[T]
    limit: QueueLimit


class Admission:
    """The waiting queue, and who may leave it for the batch. Belongs to the owner thread."""

    def __init__(
        self,
        prefixes: PrefixReuse,
        prefetches: Prefetches,
        prefiller: Prefiller,
        budget: MemoryBudget,
        hot_cache: HotCache,
        line: Line[PrefillTask],
        events: EventBuffer,
        clock: Callable[[], float],
    ) -> None:
        self._prefixes = prefixes
        self._prefetches = prefetches
        self._prefiller = prefiller
        self._budget = budget
        self._hot_cache = hot_cache
        self._queue, self._limit = line
        self._events = events
        self._clock = clock
        self._blocked_since_s: float | None = None
        self.counters: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Prefill tasks in the queue."""
        return len(self._queue)

    @property
    def tasks(self) -> list[PrefillTask]:
        """All that do not decode yet, wherever they are."""
        return [*self._queue.items(), *self._prefetches.joined, *self._prefiller.admitted]

    # ---- the queue

    def enqueue(self, task: PrefillTask) -> None:
        """Let a task wait for its turn, or for the prefetch of its session."""
        if not self._prefetches.join(task):
            _, session = task.request.key or ("", "")
            self._queue.push(task, task.request.tenant, session)

    def requeue(self, task: PrefillTask) -> None:
        """Put back what ran already; it is the next of its tenant, not of all."""
        self._queue.push_back(task, task.request.tenant)

    @property
    def head(self) -> PrefillTask | None:
        """The task that is next."""
        return self._queue.head()

    @property
    def heads(self) -> list[PrefillTask]:
        """The task that is next of each tenant."""
        return self._queue.heads()

    @property
    def parked(self) -> list[PrefillTask]:
        """All that wait with their KV, those that made way last at the end."""
        return [x for x in self._queue.items() if x.parked_bytes]

    def remove(self, task: PrefillTask) -> None:
        """Forget a task, wherever it is: its sequences are all gone."""
        self._stop_waiting(task.request)
        self._queue.remove(task)
        self._prefetches.remove(task)
        self._prefixes.cancel(task)
        self._prefiller.remove(task)

    def _stop_waiting(self, request: Request) -> None:
        if request.is_waiting:
            request.is_waiting = False
            self._limit.leave(request.tenant)

    # ---- out of the queue

    def admit(self) -> None:
        """Let in as many tasks from the head of the queue as there is room for."""
        while (task := self._queue.head()) is not None and self.enter(task):
            pass

    def enter(self, task: PrefillTask) -> bool:
        """Let a waiting task in; False if there is no room for it, or it waits no longer.

        Its request may have failed through a sibling that was to make way for it.
        """
        has_place = self._budget.missing_slots(len(task.sequences)) <= 0
        return has_place and self._has_memory(task) and self._let_in(task)

    def visit(self, task: PrefillTask) -> bool:
        """Let a task of one sequence in for a while, beyond the places; as ``enter``."""
        has_place = self._budget.has_guest_place and len(task.sequences) == 1
        if not has_place or not self._has_memory(task) or not self._let_in(task):
            return False
        task.sequences[0].is_guest = True
        return True

    def _let_in(self, task: PrefillTask) -> bool:
        if not self._queue.take(task):
            return False
        self._blocked_since_s = None
        self._stop_waiting(task.request)
        self._prefiller.admit(task)
        if task.parked_bytes:  # goes on where it was
            task.parked_bytes = 0
            self._prefiller.start(task)
        else:
            self._prefixes.find(task, partial(self._start, task))
        return True

    def _has_memory(self, task: PrefillTask) -> bool:
        own = task.request.key
        missing = self._budget.missing_for(task, own)
        if missing <= 0 or self._hot_cache.make_room(missing, own):
            return True
        if self._prefiller.num_admitted or self._budget.num_running:
            return False
        # Nothing else runs: it fits once everything idle is gone, which only waits for saves.
        now = self._clock()
        since = self._blocked_since_s = self._blocked_since_s or now
        return self._hot_cache.drop_all(own, at_any_price=now - since > SAVE_WAIT_S)

    def _start(self, task: PrefillTask, outcome: CacheOutcome) -> None:
        self._prefiller.start(task)
        self._count(task, outcome)
        if not task.request.admitted:
            task.request.admitted = True
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
