"""The way to the shared tier, which all machines of a fleet use."""

from __future__ import annotations

from collections import Counter
from typing import Final

WINDOW_S: Final = 10.0


class Link:
    """Carries so many bytes a second, first come, first served.

    Args:
        bytes_s: in both directions together; 0: there is none.
    """

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._free_at = 0.0
        self.read_bytes: Counter[int] = Counter()  # by the number of the window
        self.written_bytes: Counter[int] = Counter()

    def done_at(self, now_s: float, nbytes: int) -> float:
        """Say when so many bytes would have come through."""
        return max(now_s, self._free_at) + nbytes / self._bytes_s

    def read(self, now_s: float, nbytes: int) -> None:
        """Carry what a restore reads."""
        self._free_at = self.done_at(now_s, nbytes)
        self.read_bytes[int(now_s / WINDOW_S)] += nbytes

    def write(self, now_s: float, nbytes: int) -> None:
        """Carry what a turn's end writes."""
        if nbytes:
            self._free_at = self.done_at(now_s, nbytes)
            self.written_bytes[int(now_s / WINDOW_S)] += nbytes
