"""Admits turns to the engine: at most so many at once, a bounded queue, fair between tenants.

Every tenant has its own first-in-first-out queue; free slots go round the tenants. One tenant with
a thousand requests therefore delays another's single request by one slot, not by a thousand.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Overloaded(Exception):
    """The queue is full, or a turn waited too long in it. Try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Exception):
    """The gateway is shutting down and takes no new turns."""


class AdmissionQueue:
    """``max_running`` slots; up to ``max_waiting`` turns wait for one."""

    def __init__(self, max_running: int, max_waiting: int, max_wait_s: float) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._closed = False
        self.num_running = 0
        self.num_waiting = 0

    def close(self) -> None:
        """Refuse new turns and those that wait; turns that run may finish."""
        self._closed = True
        for line in self._lines.values():
            for slot in line:
                if not slot.done():
                    slot.set_exception(Draining("the gateway is shutting down"))

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it.

        Raises (on entering):
            Overloaded: the queue is full, or no slot was free in time.
            Draining: the gateway is shutting down.
        """
        await self._enter(tenant)
        try:
            yield
        finally:
            self.num_running -= 1
            self._call_next()

    async def _enter(self, tenant: str) -> None:
        if self._closed:
            raise Draining("the gateway is shutting down")
        if self.num_running < self._max_running and self.num_waiting == 0:
            self.num_running += 1
            return
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(
                f"{self.num_waiting} requests are waiting already", self._retry_after_s()
            )
        await self._wait(tenant)

    async def _wait(self, tenant: str) -> None:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(tenant, deque())
        line.append(slot)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await slot
        except BaseException as error:
            self._leave(tenant, slot)
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no place was free within {self._max_wait_s:g} s", self._retry_after_s()
                ) from None
            raise

    def _leave(self, tenant: str, slot: asyncio.Future[None]) -> None:
        granted = slot.done() and not slot.cancelled() and slot.exception() is None
        if granted:  # in the same instant as the cancellation: pass the slot on
            self.num_running -= 1
            self._call_next()
            return
        self.num_waiting -= 1
        line = self._lines.get(tenant)
        if line is not None and slot in line:
            line.remove(slot)
            if not line:
                del self._lines[tenant]

    def _call_next(self) -> None:
        while self._lines and self.num_running < self._max_running:
            tenant, line = next(iter(self._lines.items()))
            slot = line.popleft()
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]
            if slot.done():  # cancelled: its own _leave counts it
                continue
            self.num_waiting -= 1
            self.num_running += 1
            slot.set_result(None)

    def _retry_after_s(self) -> float:
        return min(30.0, 1.0 + self.num_waiting / self._max_running)
