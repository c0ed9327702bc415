"""Watches the machine's memory: no turn is admitted while it has too little left.

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
from collections.abc import Awaitable, Callable

from engines.base import Overloaded
from scheduler.config import SchedulerConfig
from scheduler.session import Observer

LOOK_EVERY_S = 0.25  # a burst of turns shares one look
RETRY_S = 5.0  # sessions need about this long to move to disk


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
        """True if the engine is to be restarted below a last mark."""
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
        """Return the bytes to free until the first mark is reached; 0 while there is enough.

        Bytes that leaving sessions of any model will free are not counted.
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
        before, self._level = self._level, self._new_level()
        if self._level is not before and self._bytes is not None:
            self._observer.memory(self._level.value, self._bytes)

    def _new_level(self) -> Level:
        if self._bytes is None or self._bytes >= self._low_bytes:
            return Level.ENOUGH
        mark = self._stop_bytes
        if mark and self._level is Level.SCARCE:
            mark = (mark + self._low_bytes) // 2
        return Level.SCARCE if self._bytes < mark else Level.LOW
