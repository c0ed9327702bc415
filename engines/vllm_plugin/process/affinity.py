"""Lets our threads run on all cores, although vLLM binds the thread that starts them to one.

vLLM's CPU workers bind every OpenMP thread to a core of its own, among them the worker's main
thread. A thread inherits the binding of the thread that starts it. Without this module all of our
threads would share that one core with the model, and use none of the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def unbind_thread() -> None:
    """Let the calling thread, and those it starts, run wherever the parent process may.

    The parent is vLLM's EngineCore, whose threads are not bound.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # the parent has ended, or we may not use its CPUs: stay bound
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


@contextmanager
def unbound_threads() -> Iterator[None]:
    """Unbind the calling thread for a while; threads started meanwhile stay unbound for good."""
    if sys.platform == "linux":
        bound = os.sched_getaffinity(0)
        unbind_thread()
        try:
            yield
        finally:
            os.sched_setaffinity(0, bound)
    else:
        yield
