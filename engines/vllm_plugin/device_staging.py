"""Bounded memory that blobs pass through between the host and the device.

One arena of pinned host memory, handed out as a ring: regions in the order they are asked for, each
given back whenever its user is done. Many small copies out of pageable memory are slower than one
out of pinned memory by an order of magnitude, and pinning costs milliseconds: so it is pinned once.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

STEP: Final = 256  # regions begin at multiples of so many bytes


@dataclass(eq=False)
class Region:
    """``device`` is its twin in the device's memory, or the same memory where there is none."""

    start: int
    end: int
    host: Tensor  # uint8
    device: Tensor  # uint8
    is_free: bool = False

    @property
    def array(self) -> np.ndarray:
        """The host's side, uint8, a view."""
        array: np.ndarray = self.host.numpy()
        return array

    def upload(self) -> None:
        """One copy to the twin, on the current stream; nobody waits for it."""
        if self.device is not self.host:
            self.device.copy_(self.host, non_blocking=True)


class Staging:
    """Thread-safe. ``mirrored``: regions have a twin on the device."""

    def __init__(self, nbytes: int, device: torch.device, *, mirrored: bool) -> None:
        on_gpu = device.type == "cuda"
        self._nbytes = nbytes
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        twin = mirrored and on_gpu
        self._device = torch.empty(nbytes, dtype=torch.uint8, device=device) if twin else self._host
        self._regions: deque[Region] = deque()  # in the order of the ring
        self._changed = threading.Condition()

    def take(self, nbytes: int, *, wait: bool) -> Region | None:
        """A region of ``nbytes``; None if there is no room now.

        ``wait`` until somebody else has given enough back, which whoever holds a region must not.
        """
        size = max(-(-nbytes // STEP), 1) * STEP
        assert size <= self._nbytes, "the arena is smaller than one blob"
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._room(size) is not None)
            start = self._room(size)
            if start is None:
                return None
            host = self._host[start : start + nbytes]
            twin = host if self._device is self._host else self._device[start : start + nbytes]
            region = Region(start, start + size, host, twin)
            self._regions.append(region)
            return region

    def give_back(self, region: Region) -> None:
        with self._changed:
            region.is_free = True
            while self._regions and self._regions[0].is_free:
                self._regions.popleft()
            self._changed.notify_all()

    def _room(self, size: int) -> int | None:
        """Where a region could begin: behind the newest, or at the beginning again."""
        if not self._regions:
            return 0
        oldest, newest = self._regions[0], self._regions[-1]
        if newest.start < oldest.start:  # it went round
            return newest.end if newest.end + size <= oldest.start else None
        if newest.end + size <= self._nbytes:
            return newest.end
        return 0 if size <= oldest.start else None
