"""The queue of requests that wait for memory or a slot, fair between tenants.

Tenants take turns, and within a tenant its sessions do, so a tenant with a hundred requests delays
another's single one by one request, not by a hundred. Nobody overtakes the head of the queue: a
long prompt that needs room gets it as soon as running sequences end.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

from engines.mlx_worker.generation import QueueFull

T = TypeVar("T")


class FairQueue(Generic[T]):
    """One queue per tenant and session, served in turns. Belongs to the owner thread."""

    def __init__(self) -> None:
        self._first: deque[T] = deque()
        self._tenants: dict[str, dict[str, deque[T]]] = {}

    def __len__(self) -> int:
        return len(self.items())

    def items(self) -> list[T]:
        """Everything that waits, in no order that matters."""
        queues = [queue for sessions in self._tenants.values() for queue in sessions.values()]
        return [x for queue in (self._first, *queues) for x in queue]

    def push(self, item: T, tenant: str, session: str) -> None:
        """Append ``item`` to the queue of its tenant and session."""
        self._tenants.setdefault(tenant, {}).setdefault(session, deque()).append(item)

    def push_first(self, item: T) -> None:
        """Put ``item`` before everybody: it was admitted before and had to make room."""
        self._first.appendleft(item)

    def head(self) -> T | None:
        """The next item; stays the same until it is popped or removed."""
        if self._first:
            return self._first[0]
        return next((queue[0] for x in self._tenants.values() for queue in x.values()), None)

    def pop(self) -> T:
        """Take the head out, and send its tenant and its session to the back."""
        if self._first:
            return self._first.popleft()
        tenant, sessions = next(iter(self._tenants.items()))
        session, queue = next(iter(sessions.items()))
        item = queue.popleft()
        del self._tenants[tenant], sessions[session]
        if queue:
            sessions[session] = queue
        if sessions:
            self._tenants[tenant] = sessions
        return item

    def remove(self, item: T) -> bool:
        """Take ``item`` out, wherever it is; False if it does not wait here."""
        if item in self._first:
            self._first.remove(item)
            return True
        for tenant, sessions in self._tenants.items():
            for session, queue in sessions.items():
                if item in queue:
                    queue.remove(item)
                    if not queue:
                        del sessions[session]
                    if not sessions:
                        del self._tenants[tenant]
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
