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

STEP: Final = 256  # regions begin at multiples of this many bytes


@dataclass(eq=False)
class Region:
    """A stretch of the ring.

    Attributes:
        host: uint8 (nbytes,), in pinned host memory.
        device: uint8 (nbytes,), its twin in device memory.
    """

    start: int
    end: int
    host: Tensor
    device: Tensor
    is_free: bool = False

    @property
    def array(self) -> np.ndarray:
        """A view of ``host``, uint8 (nbytes,)."""
        array: np.ndarray = self.host.numpy()
        return array

    def upload(self) -> None:
        """Start one copy to the twin, on the current stream."""
        self.device.copy_(self.host, non_blocking=True)

    def download(self) -> None:
        """Start one copy from the twin, on the current stream."""
        self.host.copy_(self.device, non_blocking=True)


class StagingRing:
    """Allocates regions of one arena. Thread-safe."""

    def __init__(self, nbytes: int, accelerator: Accelerator) -> None:
        self._nbytes = nbytes
        self._host = accelerator.pinned(nbytes)
        self._device = accelerator.twin(nbytes)
        self._regions: deque[Region] = deque()  # in the order of the ring
        self._changed = threading.Condition()

    def take(self, nbytes: int, *, wait: bool) -> Region | None:
        """Take a region of ``nbytes``; None if there is no room now.

        Args:
            wait: wait until other threads have returned enough. A thread that holds a region must
                not wait.
        """
        size = max(-(-nbytes // STEP), 1) * STEP
        assert size <= self._nbytes, "the arena is smaller than one blob"
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._next_start(size) is not None)
            start = self._next_start(size)
            if start is None:
                return None
            host, device = (x[start : start + nbytes] for x in (self._host, self._device))
            region = Region(start, start + size, host, device)
            self._regions.append(region)
            return region

    def give_back(self, region: Region) -> None:
        """Return a region whose user is done with it; on any thread, in any order."""
        with self._changed:
            region.is_free = True
            while self._regions and self._regions[0].is_free:
                self._regions.popleft()
            self._changed.notify_all()

    def _next_start(self, size: int) -> int | None:
        """Return the start for a new region, after the newest or at the beginning; None if full."""
        if not self._regions:
            return 0
        oldest, newest = self._regions[0], self._regions[-1]
        if newest.start < oldest.start:  # the ring has wrapped
            return newest.end if newest.end + size <= oldest.start else None
        if newest.end + size <= self._nbytes:
            return newest.end
        return 0 if size <= oldest.start else None
