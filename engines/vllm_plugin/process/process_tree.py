"""Ends all processes below this one for certain.

vLLM's processes ignore SIGTERM at times, so they are killed. Their shared memory (some hundred
megabytes of address space, and as much RAM as was ever written to it) is removed by Python's
resource tracker, one more process, once all others have ended. So the tracker is not killed with
them: it is left alone until then, and ends by itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import psutil

TRACKER: Final = "multiprocessing.resource_tracker"
KILLED_S: Final = 1.0  # until a process that was killed is looked for again
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
