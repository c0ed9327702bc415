"""The tiers of a simulated fleet: they keep lengths instead of blobs; one is reached by a link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from kvstore.session import TierName
from kvstore.tiers.ram_tier import RamTier

WINDOW_S: Final = 10.0


class SizedBlob(bytes):
    """Bytes of which only the number is known."""

    def __new__(cls, nbytes: int) -> SizedBlob:
        return super().__new__(cls)

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes


@lru_cache(maxsize=4096)
def sized(nbytes: int) -> SizedBlob:
    """Return a blob of so many bytes; most blobs have one of a few sizes."""
    return SizedBlob(nbytes)


class SizedTier(RamTier):
    """A tier in memory under any tier's name, by the clock of the simulation.

    Args:
        capacity_bytes: of all blobs, with the overhead of a real tier for each.
        monotonic: the clock of the simulation.
    """

    def __init__(self, name: TierName, capacity_bytes: int, monotonic: Callable[[], float]) -> None:
        super().__init__(capacity_bytes, monotonic)
        self.name = name


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
