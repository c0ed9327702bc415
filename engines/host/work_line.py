"""Bounded queues in an engine: a count of waiting requests, and a lock for work done piecewise.

They are first come, first served; the gateway's ``scheduler.admission`` is fair between tenants.
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
    """A thread-safe count of waiting requests that refuses more than ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.num_waiting = 0

    def enter(self) -> None:
        """Count one more waiting request. Raises ``QueueFull``."""
        with self._lock:
            if self.num_waiting >= self._limit:
                raise QueueFull(f"{self.num_waiting} requests are waiting already; try again later")
            self.num_waiting += 1

    def leave(self) -> None:
        """Count one waiting request less."""
        with self._lock:
            self.num_waiting -= 1


class WorkLine:
    """A queue for work that is done one piece at a time; belongs to the event loop.

    A request queues anew for each of its pieces, so requests take turns.
    """

    def __init__(self, limit: int) -> None:
        self._limit = QueueLimit(limit)
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, and hold it in the context. Raises ``QueueFull``."""
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
    """Await a step on a thread, which cannot be stopped; even if cancelled, wait for its end."""
    try:
        return await asyncio.shield(step)
    finally:
        if not step.done():
            await asyncio.wait([step])
