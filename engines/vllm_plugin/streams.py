"""Copies that do not disturb the model: on a stream of their own, where there are streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """On CUDA a stream of the lowest priority there is; elsewhere memory is simply there.

    ``mark`` on the model's thread remembers what has been asked of the device so far. Nothing here
    ever makes the model's stream wait, and waiting for this one blocks no more than the thread that
    asks: its events put the thread to sleep instead of keeping a core, and the interpreter's lock
    is released meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None

    def mark(self) -> object:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def behind(self, mark: object) -> Iterator[None]:
        """What is asked inside happens on this stream, after what ``mark`` remembers."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        """As ``behind``, and done when the block ends."""
        try:
            with self.behind(mark):
                yield
        finally:
            self.drain()

    def done(self) -> Callable[[], None]:
        """What waits until all that was asked of this stream up to now has happened."""
        if self._stream is None:
            return _nothing
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def drain(self) -> None:
        self.done()()


def _nothing() -> None:
    """Memory is simply there."""
