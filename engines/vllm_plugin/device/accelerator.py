"""Side streams of a device, marks that order them, and pinned staging memory.

A stream runs queued work later, in order. Only a mark orders that work after work on another
stream, and only ``completion`` shows that it is done; until then no thread may touch the memory
that it reads or writes. ``Cuda`` is the only supported device. Tests use a device on host memory
that runs its work late.

Blobs pass between the host and the device through one arena of pinned host memory, which has a twin
of equal size on the device. It is a ring: regions are taken in order, and each is returned when its
users are done. The arena is pinned once, because pinning costs milliseconds; many small copies from
pageable memory would be slower by an order of magnitude than one from pinned memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.blocks.blocks import Stream

STEP: Final = 256  # regions, and the parts of blobs in them, begin at multiples of this many bytes


class Accelerator(Protocol):
    """A device that packs and restores the KV in its memory."""

    def stream(self) -> Stream:
        """Return a new stream of the lowest priority."""

    def apart(self) -> AbstractContextManager[object]:
        """Make a new stream and its device current on this thread, inside the ``with`` block."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return zeroed host memory that the device can address, uint8 (nbytes,)."""

    def twin(self, nbytes: int) -> Tensor:
        """Return memory of the device, uint8 (nbytes,), which any stream may use immediately."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the device that the memory belongs to; None for memory of the host."""
    return Cuda(device) if device.type == "cuda" else None


def stream_of(device: torch.device) -> Stream:
    """Return a stream for copies out of the memory of ``device`` and into it."""
    found = accelerator_of(device)
    return found.stream() if found is not None else NoStream()


def sent(table: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a table on ``device``, made on the current stream without waiting for it."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


class Cuda:
    """Implements ``Accelerator`` for an NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Stream:
        return CudaStream(self._device)

    def apart(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream(self._device))
        return stream

    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def twin(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Work still queued on the current stream may use this memory for its previous owner.
        torch.cuda.current_stream(self._device).synchronize()
        return memory


class CudaStream:
    """A CUDA stream of the lowest priority, so that copies do not disturb the model's.

    Waiting for it blocks only the thread that waits: its events put the thread to sleep instead of
    keeping a core busy, and the interpreter's lock is released meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=0)

    def mark(self) -> object:
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def enqueue_after(self, mark: object) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        with self.enqueue_after(mark):
            try:
                yield
            finally:
                self.drain()

    def ask(self, work: Callable[[], None]) -> None:
        work()

    def completion(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def drain(self) -> None:
        # A thread that has not used CUDA yet would wait on the first device, and so create a
        # context there.
        with torch.cuda.device(self._stream.device):
            self.completion()()


class NoStream:
    """Implements ``Stream`` for memory of the host: all work runs as soon as it is queued."""

    def mark(self) -> object:
        return None

    @contextmanager
    def enqueue_after(self, mark: object) -> Iterator[None]:
        yield

    def after(self, mark: object) -> AbstractContextManager[None]:
        return self.enqueue_after(mark)

    def ask(self, work: Callable[[], None]) -> None:
        work()

    def completion(self) -> Callable[[], None]:
        return self.drain

    def drain(self) -> None:
        """Return at once."""


def rounded_up(nbytes: int) -> int:
    """Return the smallest multiple of ``STEP`` that holds ``nbytes``."""
    return max(-(-nbytes // STEP), 1) * STEP


@dataclass(eq=False)
class Region:
    """A stretch of the ring, cut into parts of equal size.

    Attributes:
        host: uint8 (num_parts, part_bytes), in pinned host memory.
        device: uint8 (num_parts, part_bytes), its twin in device memory.
        num_users: the number of users that have not returned it yet.
    """

    start: int
    end: int
    host: Tensor
    device: Tensor
    num_users: int

    def arrays(self, nbytes: int) -> list[np.ndarray]:
        """Return a view of the first ``nbytes`` of each part on the host, uint8 (nbytes,)."""
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
        """Take a region of ``num_parts`` parts of ``nbytes`` each; None if there is no room now.

        Args:
            num_users: the number of calls of ``give_back`` that free the region.
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
