"""The line of work that is done piece by piece, such as texts to be embedded: tenants take turns.

The next piece is of the tenant that was served least by its weight, as with answers; within a
tenant its requests take turns, piece by piece. One tenant's requests leave places to others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple, TypeVar

from engines.host.fair_shares import FairShares

T = TypeVar("T")


async def to_its_end(step: asyncio.Future[T]) -> T:
    """Await a step on a thread. If cancelled, return when it has ended: it cannot be stopped."""
    try:
        return await asyncio.shield(step)
    finally:
        if not step.done():
            await asyncio.wait([step])


class QueueFull(Exception):
    """Too many requests wait already."""


class Payer(NamedTuple):
    """The tenant that a request is served to, and the weight of its share."""

    tenant: str = ""
    weight: int = 1


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


class TenantLine:
    """The pieces that wait, and whose turn it is. Belongs to the event loop."""

    def __init__(self, limit: int) -> None:
        """``limit``: the most requests that are here at once; see ``QueueLimit``."""
        self._limit = QueueLimit(limit)
        self._shares = FairShares()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._busy = False

    @contextmanager
    def place(self, payer: Payer) -> Iterator[None]:
        """Hold a request's place. Raises ``QueueFull`` where there is none, for this tenant."""
        self._limit.enter(payer.tenant)
        self._shares.come(payer.tenant, payer.weight)
        try:
            yield
        finally:
            self._shares.leave(payer.tenant)
            self._limit.leave(payer.tenant)

    @asynccontextmanager
    async def turn(self, payer: Payer, cost: float | None = None) -> AsyncIterator[None]:
        """Wait until no other piece is under way and it is the tenant's turn, and hold it.

        ``cost``: what the piece counts in the tenant's share, such as its tokens, in one unit for
        the whole line; None = the seconds that it takes.
        """
        if self._busy:
            await self._called(payer.tenant)
        self._busy = True
        begin = time.monotonic()
        try:
            yield
        finally:
            self._shares.serve(payer.tenant, time.monotonic() - begin if cost is None else cost)
            self._call_next()

    async def _called(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._withdraw(tenant, turn)
            else:  # called in the very moment in which its client left
                self._call_next()
            raise

    def _call_next(self) -> None:
        while self._waiting:
            tenant = self._shares.first(self._waiting)
            turn = self._waiting[tenant][0]
            self._withdraw(tenant, turn)
            if not turn.done():
                turn.set_result(None)
                return  # it stays busy
        self._busy = False

    def _withdraw(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant)
        if line is None or turn not in line:
            return
        line.remove(turn)
        if not line:
            del self._waiting[tenant]
