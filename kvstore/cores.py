"""The number of cores that this process may use, and of its memory nodes."""

from __future__ import annotations

import os
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

LEAST_PRIORITY: Final = 19


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity, cut to a container's CPU quota."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or its quota is "max"
        return cores


def lower_priority() -> None:
    """Give all other threads priority; threads that this one starts inherit it (on Linux)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)


def memory_nodes(status: Path = Path("/proc/self/status")) -> int:
    """NUMA nodes whose memory this process may use; 1 if the system does not report them.

    A container may have fewer than the machine.
    """
    try:
        found = re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status.read_text(), re.MULTILINE)
    except OSError:
        return 1
    spans = [span.split("-") for span in found[1].split(",")] if found else []
    return max(1, sum(int(x[-1]) - int(x[0]) + 1 for x in spans))
