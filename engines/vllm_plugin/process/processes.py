"""Gives our threads all cores, and ensures that no process outlives its parent.

vLLM's CPU workers bind every OpenMP thread to a core of its own, among them the worker's main
thread. A thread inherits the binding of the thread that starts it. Unless it is unbound, all of our
threads share that one core with the model, and use none of the others.

A process that outlived its parent would hold memory, the data folder and a core for hours. On Linux
the system ends it; on other systems the process group is ended instead. vLLM's processes sometimes
ignore SIGTERM, so they are killed. Python's resource tracker, one more process, removes their
shared memory (some hundred megabytes of address space, and as much RAM as was ever written to it)
once all others have ended. So the tracker is not killed with them: it continues until then, and
ends by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import psutil

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
TRACKER: Final = "multiprocessing.resource_tracker"
KILLED_S: Final = 1.0  # the wait for killed processes before the next look for descendants
TRACKER_S: Final = 5.0


def unbind_thread() -> None:
    """Let the calling thread, and those it starts, run on all CPUs of the parent process.

    The parent is vLLM's EngineCore, whose threads are not bound.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # the parent has ended, or we may not use its CPUs: stay bound
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


@contextmanager
def unbound_threads() -> Iterator[None]:
    """Unbind the calling thread for a while; threads started meanwhile stay unbound for good."""
    if sys.platform != "linux":
        yield
        return
    bound = os.sched_getaffinity(0)
    unbind_thread()
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants of this process that lose their own parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def end_descendants() -> None:
    """Kill all descendants and return when none is left. Call ``adopt_orphans`` at start."""
    me = psutil.Process()
    while others := [x for x in me.children(recursive=True) if not _is_tracker(x)]:
        _kill(others)
    _, busy = psutil.wait_procs(me.children(), TRACKER_S)
    _kill(busy)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, KILLED_S)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return TRACKER in " ".join(process.cmdline())
    except psutil.Error:  # ended, but not yet waited for
        return False
