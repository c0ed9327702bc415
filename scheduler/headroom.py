"""How much memory the machine has left, for machines where running out of it is a disaster.

Where the GPU shares the CPU's memory (GB10), an allocation too many does not end in an error: the
whole machine hangs. So the scheduler looks before it is too late. Below ``memory_low_bytes`` the
longest quiet sessions leave memory for the disk; below ``memory_stop_bytes`` no turn is taken any
more, until half of the way back to the upper mark is regained, so that one turn does not open and
the next one close the door. Below ``memory_end_bytes`` the engine is ended, which gives back all it
had, and started again: what its sessions have on the disk stays, the machine does not hang.

What is measured is the whole machine's, so other programs count: they would hang, too.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

from scheduler.admission import Overloaded
from scheduler.config import SchedulerConfig
from scheduler.observer import Observer

LOOK_EVERY_S = 0.25  # a burst of turns shares one look
RETRY_S = 5.0  # sessions need about this long to leave for the disk


class MemoryScarce(Overloaded):
    """No turn is taken: the machine has too little memory left."""


class Level(enum.Enum):
    ENOUGH = "enough"
    LOW = "low"
    SCARCE = "scarce"


class Headroom:
    """``available`` gives bytes, or None where it cannot be known: then nothing is ever scarce."""

    def __init__(
        self,
        available: Callable[[], int | None],
        config: SchedulerConfig,
        *,
        clock: Callable[[], float],
        observer: Observer,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
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

    @property
    def available_bytes(self) -> int | None:
        """None: not watched, or not to be known here."""
        self._look()
        return self._bytes

    @property
    def scarce(self) -> bool:
        self._look()
        return self._level is Level.SCARCE

    async def guard(self, restart: Callable[[str], None]) -> None:
        """Until cancelled. A model that is being loaded takes gigabytes per second, so this looks
        often; two looks in a row count, since a single one may be a moment's.
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
        """Raises ``MemoryScarce``."""
        if self.scarce:
            raise MemoryScarce("the machine's memory is nearly used up", RETRY_S)

    def missing_bytes(self) -> int:
        """What would have to be freed; 0 while there is enough."""
        self._look()
        return 0 if self._bytes is None else max(0, self._low_bytes - self._bytes)

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
