"""The order and the memory of a device: side streams, marks, pinned memory and its device twins.

A stream runs queued work later, in order. Only a mark orders that work after work on another
stream, and only ``completion`` shows that it is done; until then no thread may touch the memory
that it reads or writes. ``Cuda`` is the only supported device. Tests use a device on host memory
that runs its work late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """Runs work in order, in parallel to the model's stream, which never waits for it."""

    def mark(self) -> object:
        """Remember the work that is queued so far on the current stream.

        Called on the model's thread.
        """

    def enqueue_after(self, mark: object) -> AbstractContextManager[None]:
        """Run the work that is queued inside the ``with`` block after the work before ``mark``."""

    def after(self, mark: object) -> AbstractContextManager[None]:
        """Enqueue like ``enqueue_after``, and wait at the end of the ``with`` block."""

    def ask(self, work: Callable[[], None]) -> None:
        """Queue launches and copies; call it inside ``enqueue_after``."""

    def completion(self) -> Callable[[], None]:
        """Return a function that waits until all work queued so far on this stream is done."""

    def drain(self) -> None:
        """Wait until this stream has no work left."""


class Accelerator(Protocol):
    """A device that packs and restores the KV in its memory."""

    def stream(self) -> Stream:
        """Make a stream of the lowest priority."""

    def apart(self) -> AbstractContextManager[object]:
        """Make a new stream and its device current on this thread, inside the ``with`` block."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that the device can address, zeros, uint8 (nbytes,)."""

    def twin(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8 (nbytes,), which any stream may use immediately."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the device that the memory belongs to; None for memory of the host."""
    return Cuda(device) if device.type == "cuda" else None


def stream_of(device: torch.device) -> Stream:
    """Make a stream for copies out of the memory of ``device``, and into it."""
    found = accelerator_of(device)
    return found.stream() if found is not None else NoStream()


def sent(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to ``device``, on the current stream, without waiting for the copy."""
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
