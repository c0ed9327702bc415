"""Bounded staging memory that blobs pass through between the host and the device.

One arena of pinned host memory, and as much on the device, is allocated as a ring: regions are
taken in order, and each is returned when its user is done. Many small copies from pageable memory
are slower by an order of magnitude than one from pinned memory, and pinning costs milliseconds: so
the arena is pinned once.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from engines.vllm_plugin.device.accelerator import Accelerator

STEP: Final = 256  # regions, and the parts of blobs in them, begin at multiples of this many bytes


def rounded_up(nbytes: int) -> int:
    """Return the smallest multiple of ``STEP`` that holds ``nbytes``."""
    return max(-(-nbytes // STEP), 1) * STEP


@dataclass(eq=False)
class Region:
    """A stretch of the ring, cut into parts of equal size.

    Attributes:
        host: uint8 (num_parts, part_bytes), in pinned host memory.
        device: uint8 (num_parts, part_bytes), its twin in device memory.
        num_users: those that have yet to return it.
    """

    start: int
    end: int
    host: Tensor
    device: Tensor
    num_users: int

    def arrays(self, nbytes: int) -> list[np.ndarray]:
        """View the first ``nbytes`` of each part on the host, uint8 (nbytes,)."""
        return list(self.host.numpy()[:, :nbytes])

    def upload(self) -> None:
        """Start one copy to the twin, on the current stream."""
        self.device.copy_(self.host, non_blocking=True)

    def download(self) -> None:
        """Start one copy from the twin, on the current stream."""
        self.host.copy_(self.device, non_blocking=True)


class StagingRing:
    """Allocates regions of one arena. Thread-safe."""

    def __init__(self, nbytes: int, accelerator: Accelerator) -> None:
        self.nbytes = rounded_up(nbytes)
        self._host = accelerator.pinned(self.nbytes)
        self._device = accelerator.twin(self.nbytes)
        self._regions: deque[Region] = deque()  # in the order of the ring
        self._changed = threading.Condition()

    def take(
        self, nbytes: int, num_parts: int = 1, *, num_users: int = 1, wait: bool
    ) -> Region | None:
        """Take a region of some parts of ``nbytes`` each; None if there is no room now.

        Args:
            num_users: the calls of ``give_back`` after which the region is free.
            wait: wait until other threads have returned enough. A thread that holds a region must
                not wait.
        """
        size = num_parts * rounded_up(nbytes)
        assert size <= self.nbytes, "the arena is smaller than one region"
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._next_start(size) is not None)
            start = self._next_start(size)
            if start is None:
                return None
            end = start + size
            host, device = (x[start:end].view(num_parts, -1) for x in (self._host, self._device))
            region = Region(start, end, host, device, num_users)
            self._regions.append(region)
            return region

    def give_back(self, region: Region) -> None:
        """Return a region for one of its users; on any thread, in any order."""
        with self._changed:
            region.num_users -= 1
            while self._regions and not self._regions[0].num_users:
                self._regions.popleft()
            self._changed.notify_all()

    def _next_start(self, size: int) -> int | None:
        """Return the start for a new region, after the newest or at the beginning; None if full."""
        if not self._regions:
            return 0
        oldest, newest = self._regions[0], self._regions[-1]
        if newest.start < oldest.start:  # the ring has wrapped
            return newest.end if newest.end + size <= oldest.start else None
        if newest.end + size <= self.nbytes:
            return newest.end
        return 0 if size <= oldest.start else None
