"""Counts what is used per minute: a bucket that fills steadily and holds a minute's worth."""

from __future__ import annotations

from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """Holds what may be used in a minute, all at once or spread; ``clock`` is in seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def remaining(self) -> int:
        """The number that may be used now; 0 while more was used than there was."""
        self._fill()
        return max(0, int(self._level))

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full again."""
        self._fill()
        return self._seconds(self.per_minute - self._level)

    def wait_s(self, number: float = 1.0) -> float:
        """Return the seconds until ``number`` may be used; 0 if it may be now."""
        self._fill()
        return self._seconds(max(0.0, min(number, float(self.per_minute)) - self._level))

    def use(self, number: float) -> None:
        """Take ``number`` out; more than there is leaves a debt of a minute's worth at most."""
        self._fill()
        self._level = max(self._level - number, -float(self.per_minute))

    def _fill(self) -> None:
        now = self._clock()
        filled = self._level + (now - self._at) * self.per_minute / MINUTE_S
        self._level, self._at = min(float(self.per_minute), filled), now

    def _seconds(self, number: float) -> float:
        return number * MINUTE_S / self.per_minute
