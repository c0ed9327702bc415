"""How many cores there are for us, and where their memory is."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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


def memory_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """NUMA nodes of this machine; 1 where the system does not tell."""
    return max(1, sum(1 for x in folder.glob("node[0-9]*") if x.is_dir()))
