"""A device on host memory that is as late as one can be: it does nothing before it is waited for.

The work of a stream is put off until a caller waits for its completion, and then done up to there,
in order. So a caller that reads rows, or gives memory back, without having waited finds the old
contents; on a GPU that would happen once in a while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from engines.vllm_plugin.device.accelerator import Accelerator, accelerator_of

UNWRITTEN = 0xA5  # bytes of device memory that nothing was copied to


class LazyStream:
    """Implements ``blocks.Stream``. Thread-safe.

    Args:
        model: the stream that marks are of; None for the model's own.
        kernels: Triton's interpreter runs one kernel at a time.
    """

    def __init__(self, model: LazyStream | None, kernels: threading.RLock) -> None:
        self._model = model
        self._kernels = kernels
        self._asking = threading.Lock()
        self._put_off: deque[Callable[[], None]] = deque()
        self._num_asked = 0
        self.num_done = 0

    @property
    def num_put_off(self) -> int:
        return len(self._put_off)

    def mark(self) -> Callable[[], None]:
        return self._model.completion() if self._model is not None else self.completion()

    @contextmanager
    def enqueue_after(self, mark: Callable[[], None] | None) -> Iterator[None]:
        if mark is not None:
            self.ask(mark)
        yield

    @contextmanager
    def after(self, mark: Callable[[], None] | None) -> Iterator[None]:
        """Copies of the host are done here and now, so the work before them is done first."""
        with self.enqueue_after(mark):
            self.drain()
            yield

    def ask(self, work: Callable[[], None]) -> None:
        with self._asking:
            self._put_off.append(work)
            self._num_asked += 1

    def completion(self) -> Callable[[], None]:
        with self._asking:
            return partial(self._catch_up, self._num_asked)

    def drain(self) -> None:
        self.completion()()

    def _catch_up(self, end: int) -> None:
        with self._kernels:
            while self.num_done < end:
                self.num_done += 1
                self._put_off.popleft()()


class LazyDevice:
    """Implements ``accelerator.Accelerator``. ``model``: the stream that a test computes on."""

    def __init__(self) -> None:
        self._kernels = threading.RLock()
        self.model = LazyStream(None, self._kernels)
        self.streams: list[LazyStream] = []  # all that were made

    @property
    def num_done(self) -> int:
        """What all streams have done so far."""
        return sum(x.num_done for x in self.streams)

    def stream(self) -> LazyStream:
        self.streams.append(LazyStream(self.model, self._kernels))
        return self.streams[-1]

    def apart(self) -> AbstractContextManager[object]:
        return nullcontext()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def twin(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), UNWRITTEN, dtype=torch.uint8)


def device_here() -> Accelerator:
    """A GPU if there is one."""
    return accelerator_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")) or (
        LazyDevice()
    )
