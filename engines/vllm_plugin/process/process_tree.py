"""Ends all processes below this one reliably.

vLLM's processes sometimes ignore SIGTERM, so they are killed. Python's resource tracker, one more
process, removes their shared memory (some hundred megabytes of address space, and as much RAM as
was ever written to it) once all others have ended. So the tracker is not killed with them: it
continues until then, and ends by itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import psutil

TRACKER: Final = "multiprocessing.resource_tracker"
KILLED_S: Final = 1.0  # the wait for killed processes before the next look for descendants
TRACKER_S: Final = 5.0


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
