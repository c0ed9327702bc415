"""The memory and disk that this process may really use."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


class _Names(NamedTuple):
    """The files of a group of processes, and which of its memory holds files."""

    limit: str
    used: str
    files: tuple[str, ...]


_V1: Final = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2: Final = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """Bytes that can be allocated now without swapping, the container's limit included."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups(cgroup, own)])


def machine_memory(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_GROUPS
) -> int | None:
    """Bytes that the machine can still give to this process; None where the system does not say.

    Memory that a GPU shares with the CPU is charged to no container, so a container's limit alone
    would not do: the smaller one counts.
    """
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return min([int(amount.split()[0]) << 10, *_left_in_groups(cgroup, own)])
    return None


def free_disk(folder: Path) -> int:
    """Bytes free where ``folder`` is, or would be once it is created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _left_in_groups(cgroup: Path, own: Path) -> Iterator[int]:
    """Yield what each limited group has left: the one that this process is in, and all above it.

    Pages of files are left, too: the kernel takes them back before it ends a process.
    """
    for folder, names in _groups(cgroup, own):
        with contextlib.suppress(OSError, ValueError):  # no such group here, or no limit ("max")
            limit = int((folder / names.limit).read_text())
            used = int((folder / names.used).read_text())
            yield max(0, limit - used + _file_bytes(folder / "memory.stat", names.files))


def _groups(cgroup: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the groups' folders, those of cgroup v2 and those of v1.

    A container often sees its own group as the root of all, and its name from outside.
    """
    yield cgroup, _V2
    yield cgroup / "memory", _V1
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, name = rest.partition(":")
            root, names = (cgroup, _V2) if not controllers else (cgroup / "memory", _V1)
            if not controllers or "memory" in controllers.split(","):
                path = PurePosixPath(name.lstrip("/"))
                yield from ((root / x, names) for x in (path, *path.parents) if x.parts)


def _file_bytes(stat: Path, names: tuple[str, ...]) -> int:
    """Bytes of a group's memory that hold pages of files; 0 where that is not said."""
    with contextlib.suppress(OSError, ValueError):
        found = dict(x.split(" ", 1) for x in stat.read_text().splitlines())
        return sum(int(found.get(x, 0)) for x in names)
    return 0
