"""Copies that do not disturb the model: on a stream of their own, where there are streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """On CUDA a low-priority stream; elsewhere memory is simply there.

    ``mark`` on the model's thread remembers what has been asked of the device so far; work inside
    ``after`` starts when that is done, and is done when the block ends.
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
    def after(self, mark: object) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
        self._stream.synchronize()
