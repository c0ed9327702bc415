"""Bounds what waits in an engine: requests for a place, and work that is done piece by piece.

Both are first come, first served: shares between tenants are the gateway's business
(``scheduler.admission``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """Too many requests wait already."""


class QueueLimit:
    """Counts the requests that wait, and refuses more than so many. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.num_waiting = 0

    def enter(self) -> None:
        """Count one more. Raises ``QueueFull``."""
        with self._lock:
            if self.num_waiting >= self._limit:
                raise QueueFull(f"{self.num_waiting} requests are waiting already; try again later")
            self.num_waiting += 1

    def leave(self) -> None:
        """Count one less."""
        with self._lock:
            self.num_waiting -= 1


class WorkLine:
    """Lets one piece of work be done at a time. Belongs to the event loop.

    A request that comes again for its next piece goes to the end, so requests take turns.
    """

    def __init__(self, limit: int) -> None:
        self._limit = QueueLimit(limit)
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, and hold it. Raises ``QueueFull``."""
        self._limit.enter()
        try:
            await self._lock.acquire()
        finally:
            self._limit.leave()
        try:
            yield
        finally:
            self._lock.release()


async def to_its_end(step: asyncio.Future[T]) -> T:
    """Await a step on a thread. If cancelled, return when it has ended: it cannot be stopped."""
    try:
        return await asyncio.shield(step)
    finally:
        if not step.done():
            await asyncio.wait([step])
