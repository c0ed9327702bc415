"""Measures how long work takes, and how long its threads waited for a processor meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

TASKS: Final = Path("/proc/self/task")
# Seconds that each thread was ready to run and had no processor, by thread id.
Waits: TypeAlias = Mapping[int, float]


class Speed(NamedTuple):
    """The time that 1,000 tokens took.

    Attributes:
        seconds: wall-clock time, without the time spent waiting for a processor.
        waited: the part of the wall-clock time that was spent waiting, 0 to 1; see ``Stopwatch``.
    """

    seconds: float
    waited: float = 0.0

    def plus(self, other: Speed, share: float) -> Speed:
        """Return the speed of doing both in turn, ``other`` for a part ``share`` of the tokens."""
        return Speed(self.seconds + other.seconds * share, max(self.waited, other.waited))


def processor_waits(tasks: Path = TASKS) -> dict[int, float]:
    """Return how long each thread of this process has waited for a processor, in seconds.

    {} if the system does not count it; only Linux does.
    """
    found: dict[int, float] = {}
    for file in tasks.glob("*/schedstat"):
        try:
            found[int(file.parent.name)] = int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            continue  # the thread has just ended, or the system does not count
    return found


class Stopwatch:
    """Measures the block of a ``with`` statement.

    Threads that end within the block are not seen: keep a pool's threads until the block's end.

    Attributes:
        seconds: wall-clock time of the block.
        waited: the part of it, 0 to 1, that the thread that waited longest spent without a
            processor; about 0 on a machine that nothing else uses.
    """

    seconds = 0.0
    waited = 0.0

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        waits: Callable[[], Waits] = processor_waits,
    ) -> None:
        self._clock = clock
        self._waits = waits

    def __enter__(self) -> Stopwatch:
        self._before = self._waits()
        self._began = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = self._clock() - self._began
        lost = [x - self._before.get(thread, 0.0) for thread, x in self._waits().items()]
        self.waited_also(max(lost, default=0.0))

    def waited_also(self, seconds: float) -> None:
        """Count at least ``seconds`` of the block as waiting."""
        if self.seconds > 0:
            self.waited = max(self.waited, min(seconds / self.seconds, 1.0))

    def speed(self, num_tokens: int) -> Speed:
        """Return the speed of the block's work on ``num_tokens`` tokens."""
        return Speed(1000 * self.seconds * (1 - self.waited) / num_tokens, self.waited)
