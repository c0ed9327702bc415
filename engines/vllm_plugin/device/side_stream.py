"""A low-priority CUDA stream for copies, so that they do not disturb the model's stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """A CUDA stream of the lowest priority; without CUDA, work is done when it is asked for.

    ``mark`` is called on the model's thread. Nothing here ever makes the model's stream wait, and
    waiting for this stream blocks only the thread that waits: its events put the thread to sleep
    instead of keeping a core busy, and the interpreter's lock is released meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None

    def mark(self) -> object:
        """Remember what has been asked of the device so far, on the current stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def enqueue_after(self, mark: object) -> Iterator[None]:
        """Enqueue what is asked inside on this stream, after what ``mark`` remembers."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        """Enqueue like ``enqueue_after``, and wait at the end of the ``with`` block."""
        try:
            with self.enqueue_after(mark):
                yield
        finally:
            self.drain()

    def completion(self) -> Callable[[], None]:
        """Return a function that waits until all that this stream was asked so far is done."""
        if self._stream is None:
            return _nothing
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def drain(self) -> None:
        """Wait until this stream has nothing left to do."""
        self.completion()()


def _nothing() -> None:
    """Return at once: without a stream everything is done already."""
