"""The queue of requests that wait for memory or a place, fair between tenants.

The tenant that was served least is next (``engines.host.fair_shares``), and within a tenant its
sessions take turns. A tenant with a hundred requests delays another's single one by one request,
not by a hundred. Nobody overtakes the head of the queue, but a tenant that was served less: a long
prompt that needs room gets it as soon as running sequences end.

Who ran already and had to make way waits before the others of its own tenant, not of all.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from engines.mlx_worker.generation import QueueFull

T = TypeVar("T")


class _Tenant(Generic[T]):
    """All that waits of one tenant."""

    def __init__(self) -> None:
        self.back: deque[T] = deque()  # ran already; the one that made way first is first
        self.sessions: dict[str, deque[T]] = {}

    def queues(self) -> Iterable[deque[T]]:
        return (self.back, *self.sessions.values())

    def head(self) -> T:
        return next(queue[0] for queue in self.queues() if queue)

    def pop(self) -> T:
        if self.back:
            return self.back.popleft()
        session, queue = next(iter(self.sessions.items()))
        item = queue.popleft()
        del self.sessions[session]
        if queue:
            self.sessions[session] = queue
        return item

    def remove(self, item: T) -> bool:
        for queue in self.queues():
            if item in queue:
                queue.remove(item)
                self.sessions = {name: x for name, x in self.sessions.items() if x}
                return True
        return False

    def __len__(self) -> int:
        return sum(len(queue) for queue in self.queues())


def first_come(tenants: Iterable[str]) -> str:
    """Choose the tenant that has waited longest."""
    return next(iter(tenants))


class FairQueue(Generic[T]):
    """One queue per tenant and session, served in turns. Belongs to the owner thread."""

    def __init__(self, first: Callable[[Iterable[str]], str] = first_come) -> None:
        """``first`` chooses among the tenants that wait, the longest-waiting first."""
        self._first = first
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
        return self._tenants.setdefault(tenant, _Tenant())

    def head(self) -> T | None:
        """The next item; stays the same until it is taken, or a tenant comes that goes before."""
        if not self._tenants:
            return None
        return self._tenants[self._first(self._tenants)].head()

    def pop(self) -> T:
        """Take the head out, and send its tenant and its session to the back."""
        name = self._first(self._tenants)
        tenant = self._tenants.pop(name)
        item = tenant.pop()
        if len(tenant):
            self._tenants[name] = tenant
        return item

    def take(self, item: T) -> None:
        """Take out ``item``, the head of its tenant, as ``pop`` would."""
        for name, tenant in self._tenants.items():
            if tenant.head() is item:
                del self._tenants[name]
                tenant.pop()
                if len(tenant):
                    self._tenants[name] = tenant
                return
        self.remove(item)

    def remove(self, item: T) -> bool:
        """Take ``item`` out, wherever it is; False if it does not wait here."""
        for name, tenant in self._tenants.items():
            if tenant.remove(item):
                if not len(tenant):
                    del self._tenants[name]
                return True
        return False


class QueueLimit:
    """Bounds how many requests wait, in all and for each tenant. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, tenant: str) -> None:
        """Count one more waiting request of this tenant.

        Raises:
            QueueFull: the queue is full, or this tenant's share of it.
        """
        with self._lock:
            # One tenant alone may not fill the queue and so refuse everybody else.
            if self._waiting.total() >= self._limit or self._waiting[tenant] >= self.share:
                raise QueueFull(
                    f"{self._waiting.total()} requests are waiting already; try again later"
                )
            self._waiting[tenant] += 1

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return self._waiting.total()

    @property
    def share(self) -> int:
        """The most requests of one tenant that may wait at a time."""
        return max(1, self._limit * 3 // 4)

    def leave(self, tenant: str) -> None:
        """Count one waiting request of this tenant less."""
        with self._lock:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]


class Line(NamedTuple, Generic[T]):
    """The queue, and the bound of what may wait in it."""

    queue: FairQueue[T]
    limit: QueueLimit
