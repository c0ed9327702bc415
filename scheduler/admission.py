"""Admits turns to the engine: a limited number at once, and none while the machine has no memory.

Every tenant has its own first-in-first-out queue, and a free slot goes to the tenant that holds the
fewest by its weight. One tenant with a thousand requests therefore delays another's single request
by one slot, not by a thousand.

Turns may last for hours, so one tenant's turns could hold all slots and free none. A tenant that
holds less than its share is then admitted beyond them, up to twice as many in all. Inside the
engine shares are kept by taking places away again, which cannot be done here.

If the GPU shares the CPU's memory (GB10), one allocation too many does not fail: the whole machine
hangs. So the scheduler acts before that, at three marks. Below ``memory_low_bytes`` the longest
quiet sessions move from memory to disk. Below ``memory_stop_bytes`` no turn is admitted until
memory is halfway back to ``memory_low_bytes``, so that single turns do not toggle admission. Below
``memory_end_bytes`` the engine is ended, which frees all its memory, and restarted; its sessions'
data on disk stays. The figure is the whole machine's, so it includes other programs; or, if less,
the memory that a container's limit leaves.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from scheduler.config import SchedulerConfig
from scheduler.session import Observer

LOOK_EVERY_S = 0.25  # a burst of turns shares one look
RETRY_S = 5.0  # sessions need about this long to move to disk


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


class MemoryScarce(Overloaded):
    """No turn is admitted: the machine has too little memory left."""


class Level(enum.Enum):
    """The state of the machine's memory. LOW: sessions leave it; SCARCE: no turn is admitted."""

    ENOUGH = "enough"
    LOW = "low"
    SCARCE = "scarce"


class Headroom:
    """Compares the machine's memory with the marks of ``SchedulerConfig``; one for all models."""

    def __init__(
        self,
        available: Callable[[], int | None],
        config: SchedulerConfig,
        *,
        clock: Callable[[], float],
        observer: Observer,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``available`` returns bytes, or None if they are unknown: then nothing is scarce."""
        self._sleep = sleep
        self._available = available
        self._low_bytes = config.memory_low_bytes
        self._stop_bytes = config.memory_stop_bytes
        self._end_bytes = config.memory_end_bytes
        self._clock = clock
        self._observer = observer
        self._level = Level.ENOUGH
        self._looked = float("-inf")
        self._bytes: int | None = None
        self._leaving: list[Callable[[], int]] = []

    @property
    def guards(self) -> bool:
        """True if there is a last mark."""
        return self._end_bytes > 0

    def count_leaving(self, leaving: Callable[[], int]) -> None:
        """Count from now on the bytes that one model's sessions will free as they leave memory.

        Args:
            leaving: returns these bytes.
        """
        self._leaving.append(leaving)

    @property
    def available_bytes(self) -> int | None:
        """Bytes that the machine has left; None if they are not watched or cannot be known."""
        self._look()
        return self._bytes

    @property
    def scarce(self) -> bool:
        """True while no turn may be admitted."""
        self._look()
        return self._level is Level.SCARCE

    async def guard(self, restart: Callable[[str], None]) -> None:
        """Call ``restart`` whenever memory is below the last mark; runs until cancelled.

        A model that is being loaded takes gigabytes per second, so this looks often. Only two low
        figures in a row count: a single one may be a spike.
        """
        low = 0
        while True:
            await self._sleep(LOOK_EVERY_S)
            left = self._available()
            low = low + 1 if left is not None and left < self._end_bytes else 0
            if low == 2:
                self._observer.decision("restart-engine")
                restart(f"only {(left or 0) >> 20} MiB of the machine's memory are left")
                await self._sleep(RETRY_S)
                low = 0

    def admit(self) -> None:
        """Refuse a turn while memory is scarce. Raises ``MemoryScarce``."""
        if self.scarce:
            raise MemoryScarce("the machine's memory is nearly used up", RETRY_S)

    def missing_bytes(self) -> int:
        """Bytes that would have to be freed to reach the first mark; 0 while there is enough.

        Bytes that leaving sessions of any model already free are not missing.
        """
        self._look()
        if self._bytes is None or self._bytes >= self._low_bytes:
            return 0
        return max(0, self._low_bytes - self._bytes - sum(x() for x in self._leaving))

    def _look(self) -> None:
        now = self._clock()
        if not self._low_bytes or now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        self._bytes = self._available()
        before, self._level = self._level, self._next()
        if self._level is not before and self._bytes is not None:
            self._observer.memory(self._level.value, self._bytes)

    def _next(self) -> Level:
        if self._bytes is None or self._bytes >= self._low_bytes:
            return Level.ENOUGH
        mark = self._stop_bytes
        if mark and self._level is Level.SCARCE:
            mark = (mark + self._low_bytes) // 2
        return Level.SCARCE if self._bytes < mark else Level.LOW
