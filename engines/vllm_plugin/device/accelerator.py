"""The order and the memory of a device: streams beside the model's, marks, pinned memory and twins.

Work is asked of a stream and done later, in order. Only a mark says what comes before it on another
stream, and only ``completion`` says when it is done; until then nothing may touch what it reads or
writes. ``Cuda`` is the only device that is served. Tests have one on host memory that is late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """Does what it is asked in order, beside the model's stream, which never waits for it."""

    def mark(self) -> object:
        """Remember what has been asked of the device so far, on the current stream.

        Called on the model's thread.
        """

    def enqueue_after(self, mark: object) -> AbstractContextManager[None]:
        """Do what is asked inside after what ``mark`` remembers."""

    def after(self, mark: object) -> AbstractContextManager[None]:
        """Enqueue like ``enqueue_after``, and wait at the end of the ``with`` block."""

    def ask(self, work: Callable[[], None]) -> None:
        """Have launches and copies done; inside of ``enqueue_after``."""

    def completion(self) -> Callable[[], None]:
        """Return a function that waits until all that this stream was asked so far is done."""

    def drain(self) -> None:
        """Wait until this stream has nothing left to do."""


class Accelerator(Protocol):
    """A device that packs and restores the KV in its memory."""

    def stream(self) -> Stream:
        """Make a stream of the lowest priority."""

    def apart(self) -> AbstractContextManager[object]:
        """Make another stream, and its device, those of this thread for a while."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that the device can address, zeros, uint8 (nbytes,)."""

    def twin(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8 (nbytes,), which any stream may use at once."""


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
        # What the current stream has yet to do may be about the memory's last user.
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
        # A thread that never asked CUDA for anything waits on the first device, and so opens it.
        with torch.cuda.device(self._stream.device):
            self.completion()()


class NoStream:
    """Implements ``Stream`` for memory of the host: all is done when it is asked for."""

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
