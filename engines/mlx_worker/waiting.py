"""Who is next when there is no room for everybody.

Tenants take turns, and within a tenant its sessions do, so a tenant with a hundred requests delays
another's single one by one request, not by a hundred. Nobody overtakes the head of the line: a
long prompt that needs room gets it as soon as running rows end.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

from engines.mlx_worker.generation import Overloaded

T = TypeVar("T")


class FairLine(Generic[T]):
    """One line per tenant and session. Not thread-safe: the owner's own."""

    def __init__(self) -> None:
        self._first: deque[T] = deque()
        self._tenants: dict[str, dict[str, deque[T]]] = {}

    def __len__(self) -> int:
        return len(self.items())

    def items(self) -> list[T]:
        lines = [line for sessions in self._tenants.values() for line in sessions.values()]
        return [x for line in (self._first, *lines) for x in line]

    def push(self, item: T, tenant: str, session: str) -> None:
        self._tenants.setdefault(tenant, {}).setdefault(session, deque()).append(item)

    def push_first(self, item: T) -> None:
        """Before everybody: it had been admitted already and had to make room."""
        self._first.appendleft(item)

    def head(self) -> T | None:
        """The same item until it is popped or removed."""
        if self._first:
            return self._first[0]
        return next((line[0] for x in self._tenants.values() for line in x.values()), None)

    def pop(self) -> T:
        """Take the head out, and send its tenant and its session to the back."""
        if self._first:
            return self._first.popleft()
        tenant, sessions = next(iter(self._tenants.items()))
        session, line = next(iter(sessions.items()))
        item = line.popleft()
        del self._tenants[tenant], sessions[session]
        if line:
            sessions[session] = line
        if sessions:
            self._tenants[tenant] = sessions
        return item

    def remove(self, item: T) -> bool:
        """False if it does not wait here."""
        if item in self._first:
            self._first.remove(item)
            return True
        for tenant, sessions in self._tenants.items():
            for session, line in sessions.items():
                if item in line:
                    line.remove(item)
                    if not line:
                        del sessions[session]
                    if not sessions:
                        del self._tenants[tenant]
                    return True
        return False


class Places:
    """Bounds the line, for all and for each tenant. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, tenant: str) -> None:
        """Raises ``Overloaded`` if the line is full, or this tenant's share of it."""
        with self._lock:
            # One tenant alone may not fill the line and so refuse everybody else.
            if self._taken.total() >= self._limit or self._taken[tenant] >= self.share:
                raise Overloaded(
                    f"{self._taken.total()} requests are waiting already; try again later"
                )
            self._taken[tenant] += 1

    @property
    def num_taken(self) -> int:
        with self._lock:
            return self._taken.total()

    @property
    def share(self) -> int:
        return max(1, self._limit * 3 // 4)

    def leave(self, tenant: str) -> None:
        with self._lock:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
