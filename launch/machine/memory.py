"""The memory and disk that this process may really use."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated now without swapping, the container's limit included."""
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_number(cgroup / "memory.max")
    used = _cgroup_number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def machine_memory(meminfo: Path = MEMINFO) -> int | None:
    """Bytes that the whole machine can still give away; None where the system does not say.

    A container's limit is left out: memory that a GPU shares with the CPU is charged to none.
    """
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) << 10
    return None


def free_disk(folder: Path) -> int:
    """Bytes free where ``folder`` is, or would be once it is created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _cgroup_number(path: Path) -> int | None:
    """The number in a file of the cgroup; None: no cgroup v2 here, or no limit ("max")."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None
