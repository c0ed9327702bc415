"""Threads of the cold store: the cores it may use, the codec threads, and tasks at intervals."""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from kvstore.errors import StoreClosed

LEAST_PRIORITY: Final = 19
T = TypeVar("T")
K = TypeVar("K")
MAX_DEFAULT_THREADS: Final = 4
# A tier that hangs occupies readers, never codec threads. When it occupies all, restores time out.
NUM_READERS: Final = 4
_log = logging.getLogger(__name__)
_of_thread = threading.local()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use: its affinity, limited to the CPU quota."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or its quota is "max"
        return cores


@functools.cache
def processors(about: Path = Path("/proc/cpuinfo")) -> str:
    """Return the number and the name of the machine's processors, such as "2 x AMD EPYC 9B14".

    It counts all of them, also those that this thread may not use.
    """
    kind = platform.processor() or platform.machine()
    with suppress(OSError):  # no Linux
        found = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", about.read_text(), re.MULTILINE)
        kind = found[1] if found else kind
    return f"{os.cpu_count()} x {kind}"


def lower_priority() -> None:
    """Lower this thread's priority below all others; its new threads inherit that on Linux."""
    _of_thread.is_background = True
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)


@contextmanager
def in_background() -> Iterator[None]:
    """Mark this thread as one for which no request waits, within the ``with`` block."""
    before, _of_thread.is_background = is_background(), True
    try:
        yield
    finally:
        _of_thread.is_background = before


def is_background() -> bool:
    """Return whether this thread is marked as one for which no request waits."""
    return getattr(_of_thread, "is_background", False)


def memory_nodes(status: Path = Path("/proc/self/status")) -> int:
    """Count the NUMA nodes whose memory this process may use; 1 if the system reports none.

    A container may use fewer than the machine has.
    """
    try:
        found = re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status.read_text(), re.MULTILINE)
    except OSError:
        return 1
    spans = [span.split("-") for span in found[1].split(",")] if found else []
    return max(1, sum(int(x[-1]) - int(x[0]) + 1 for x in spans))


def default_threads() -> int:
    """Return the default number of codec threads, which leaves one core to the engine."""
    return min(max(usable_cores() - 1, 1), MAX_DEFAULT_THREADS)


def restoring_threads(num_threads: int) -> int:
    """Return how many threads unpack a session: the codec threads and the thread that waits."""
    return (num_threads or default_threads()) + 1


class Workers:
    """The threads of one store. Thread-safe; after ``close`` calls raise ``StoreClosed``."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads or default_threads()
        self._codec = ThreadPoolExecutor(self.num_threads, "kvstore-codec")
        self._readers = ThreadPoolExecutor(NUM_READERS, "kvstore-read")
        self._lock = threading.Lock()
        self._unfinished: set[Future[Any]] = set()

    def codec(self, call: Callable[..., T], *args: object) -> Future[T]:
        return _submit(self._codec, call, *args)

    def read(self, call: Callable[..., T], *args: object) -> Future[T]:
        return _submit(self._readers, call, *args)

    def each(self, call: Callable[[K], T], items: Iterable[K]) -> list[T]:
        """Call ``call`` with each item on the codec threads; return the results in order.

        At most one call per thread is submitted at a time, so that a restore, which submits its
        calls to the same threads, never waits for the whole list.
        """
        running: deque[Future[T]] = deque()
        done: list[T] = []
        for item in items:
            if len(running) >= self.num_threads:
                done.append(running.popleft().result())
            running.append(self.codec(call, item))
        return [*done, *(x.result() for x in running)]

    def later(self, call: Callable[..., None], *args: object) -> None:
        """Run a call on a reader thread, without a result. ``quiet`` waits for such calls."""
        future = _submit(self._readers, call, *args)
        with self._lock:
            self._unfinished.add(future)
        future.add_done_callback(self._forget)

    def quiet(self, timeout_s: float) -> bool:
        """Wait until all calls given to ``later`` so far are done; False if that took too long."""
        with self._lock:
            unfinished = set(self._unfinished)
        return not wait(unfinished, timeout_s).not_done

    def close(self) -> None:
        """Wait for submitted calls, and stop the threads."""
        self._readers.shutdown(wait=True)
        self._codec.shutdown(wait=True)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._unfinished.discard(future)
        error = future.exception()
        if error is not None:
            _log.error("a background task of the cold store failed", exc_info=error)


class Task(Generic[T]):
    """A call that is queued for a codec thread and that the waiting thread may run instead."""

    def __init__(self, workers: Workers, call: Callable[[], T]) -> None:
        self._call = call
        self.future = workers.codec(call)

    def take(self) -> bool:
        """Run the call on this thread; return False if a codec thread has already begun it."""
        if not self.future.cancel():
            return False
        self.future = Future()
        self.future.set_result(self._call())
        return True


def _submit(pool: ThreadPoolExecutor, call: Callable[..., T], *args: object) -> Future[T]:
    try:
        return pool.submit(call, *args)
    except RuntimeError as error:  # raised by a pool that is shut down
        raise StoreClosed("the cold store is closed") from error


class Periodic:
    """Calls ``work`` every ``every_s`` seconds until ``close``; with ``at_once`` also at start."""

    def __init__(
        self, work: Callable[[], None], every_s: float, name: str, *, at_once: bool = False
    ) -> None:
        self._work = work
        self._every_s = every_s
        self._first_s = 0.0 if at_once else every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for a running call of ``work``."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._closed.wait(wait_s):
            wait_s = self._every_s
            try:
                self._work()
            except Exception:  # the outermost frame of this thread: a bad round must not end it
                _log.exception("a round of %s failed", self._thread.name)
