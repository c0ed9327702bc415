"""Admits turns to the engine: a limited number at once, a bounded queue, fair between tenants.

Every tenant has its own first-in-first-out queue, and a free slot goes to the tenant that holds the
fewest by its weight. One tenant with a thousand requests therefore delays another's single request
by one slot, not by a thousand.

Turns may last for hours, so one tenant's turns could hold all slots and free none. A tenant that
holds less than its share is then admitted beyond them, up to twice as many in all. Inside the
engine shares are kept by taking places away again, which cannot be done here.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable
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
        self._running: Counter[str] = Counter()
        self._weights: dict[str, int] = {}  # of the tenants that run or wait
        self._closed = False
        self.num_waiting = 0

    @property
    def num_running(self) -> int:
        """Number of turns that hold a slot."""
        return self._running.total()

    def close(self) -> None:
        """Refuse new turns and waiting ones; running turns may finish."""
        self._closed = True
        for line in self._lines.values():
            for slot in line:
                if not slot.done():
                    slot.set_exception(Draining("the gateway is shutting down"))

    @asynccontextmanager
    async def slot(self, tenant: str, weight: int = 1) -> AsyncIterator[None]:
        """Wait for a slot, and hold it; ``weight``: the tenant's share of them, from now on.

        Raises (on entering):
            Overloaded: the queue is full, or no slot was free in time.
            Draining: the gateway is shutting down.
        """
        if self._closed:
            raise Draining("the gateway is shutting down")
        self._weights[tenant] = max(1, weight)
        try:
            await self._enter(tenant)
            try:
                yield
            finally:
                self._leave(tenant)
        finally:
            if not self._running[tenant] and tenant not in self._lines:
                self._running.pop(tenant, None)
                self._weights.pop(tenant, None)
            self._call_next()  # a slot may be free, or the shares of others larger

    async def _enter(self, tenant: str) -> None:
        free = self.num_running < self._max_running and self.num_waiting == 0
        if free or (tenant not in self._lines and self._within_share([tenant])):
            self._running[tenant] += 1
            return
        mine = len(self._lines.get(tenant, ()))
        # A quarter of the line is kept from the tenant that waits most, for the other tenants.
        if mine >= self._max_waiting - self._max_waiting // 4:
            raise self._full()
        if self.num_waiting >= self._max_waiting:
            raise self._full()
        await self._wait(tenant)

    def _within_share(self, tenants: Iterable[str]) -> list[str]:
        """Return those whose next turn is within their share, whichever tenants hold the slots."""
        if self.num_running >= 2 * self._max_running:
            return []
        total = sum(self._weights.values())
        shares = {x: self._max_running * self._weights[x] // total for x in tenants}
        return [x for x, share in shares.items() if self._running[x] < max(1, share)]

    def _full(self) -> Overloaded:
        return Overloaded(f"{self.num_waiting} requests are waiting already", self._retry_after_s())

    async def _wait(self, tenant: str) -> None:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(slot)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await slot
        except BaseException as error:
            self._withdraw(tenant, slot)
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no place was free within {self._max_wait_s:g} s", self._retry_after_s()
                ) from None
            raise

    def _withdraw(self, tenant: str, slot: asyncio.Future[None]) -> None:
        granted = slot.done() and not slot.cancelled() and slot.exception() is None
        if granted:  # in the same instant as the cancellation: pass the slot on
            self._leave(tenant)
            return
        self.num_waiting -= 1
        line = self._lines.get(tenant)
        if line is not None and slot in line:
            line.remove(slot)
            if not line:
                del self._lines[tenant]

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1

    def _call_next(self) -> None:
        while called := self._can_be_called():
            tenant = min(called, key=lambda x: self._running[x] / self._weights[x])
            line = self._lines[tenant]
            slot = line.popleft()
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]
            if slot.done():  # cancelled: its own _withdraw counts it
                continue
            self.num_waiting -= 1
            self._running[tenant] += 1
            slot.set_result(None)

    def _can_be_called(self) -> Iterable[str]:
        """Return the waiting tenants whose next turn may begin now."""
        if not self._lines or self.num_running < self._max_running:
            return self._lines
        return self._within_share(self._lines)

    def _retry_after_s(self) -> float:
        return min(30.0, 1.0 + self.num_waiting / self._max_running)
