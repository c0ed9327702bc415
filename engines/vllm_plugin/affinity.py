"""Threads of ours beside those of the model.

vLLM's CPU workers bind every OpenMP thread to a core of its own, and with them the worker's main
thread, which is one of them. A thread inherits the binding of the thread that starts it: left
alone, all of ours would share that one core with the model, and none of the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def roam() -> None:
    """Let the calling thread, and those it starts, run wherever the parent process may.

    The parent is vLLM's engine core, whose threads are not bound.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # the parent is gone, or its CPUs are not ours: stay where we are
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


@contextmanager
def roaming() -> Iterator[None]:
    """``roam`` for a while, so that threads started meanwhile do for good."""
    if sys.platform == "linux":
        bound = os.sched_getaffinity(0)
        roam()
        try:
            yield
        finally:
            os.sched_setaffinity(0, bound)
    else:
        yield
