"""The memory, disk, GPUs, processor and open files that this process may use.

mlx_lm sets the hard limit of open files to 4,096 when it is imported. The system forbids that to a
process whose hard limit is lower, so the engine would fail at each start. Therefore the limit is
checked, and raised if that is allowed, before anything is started.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import psutil

from launch.errors import LaunchError

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
_COMMAND: Final = ("nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S: Final = 20.0
LEAST = 256  # for the engine, the logs and a few connections
COMFORTABLE = 1024
MLX_LM_SETS = 4096
MOST = 1 << 20  # the soft limit to set if there is no hard limit


class _Names(NamedTuple):
    """Names in a cgroup: of its files, and of the fields of memory.stat that count file pages."""

    limit: str
    used: str
    files: tuple[str, ...]


_V1: Final = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2: Final = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """Return the bytes that can be allocated now without swapping, within the container's limit."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups(cgroup, own)])


def machine_memory(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_GROUPS
) -> int | None:
    """Return the bytes that the machine can still give to this process; None if it does not say.

    It is the smaller of the machine's free memory and the container's: memory that a GPU shares
    with the CPU is charged to no container.
    """
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return min([int(amount.split()[0]) << 10, *_left_in_groups(cgroup, own)])
    return None


def free_disk(folder: Path) -> int:
    """Return the free bytes of the disk on which ``folder`` is or would be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _left_in_groups(cgroup: Path, own: Path) -> Iterator[int]:
    """Yield the bytes left in each cgroup with a limit: this process's own and all above it.

    Pages of files count as free: the kernel reclaims them before it kills a process.
    """
    for folder, names in _groups(cgroup, own):
        with contextlib.suppress(OSError, ValueError):  # no such group here, or no limit ("max")
            limit = int((folder / names.limit).read_text())
            used = int((folder / names.used).read_text())
            yield max(0, limit - used + _file_bytes(folder / "memory.stat", names.files))


def _groups(cgroup: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of this process's groups, of cgroup v2 and of v1.

    In a container its own group is often mounted as the root, while /proc has the name that the
    group has on the host; so the root is tried, too.
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
    """Return the bytes of a group's memory that are pages of files; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        found = dict(x.split(" ", 1) for x in stat.read_text().splitlines())
        return sum(int(found.get(x, 0)) for x in names)
    return 0


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    free_bytes: int | None  # None: it has no memory of its own (GB10 shares the CPU's)


def find_gpus() -> list[Gpu]:
    """Return the GPUs with their free memory; empty if no driver answers."""
    try:
        run = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(run.stdout) if run.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """Read lines such as ``NVIDIA H200, 142000`` (MiB) or ``NVIDIA GB10, [N/A]``."""
    gpus = []
    for line in text.splitlines():
        name, comma, free = (x.strip() for x in line.rpartition(","))
        if comma:
            gpus.append(Gpu(name, int(free) << 20 if free.isdigit() else None))
    return gpus


def has_matrix_tiles(about: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if the processor has AMX tiles, which some of vLLM's kernels need."""
    with suppress(OSError):
        return " amx_tile" in about.read_text("utf-8")
    return False


def raise_open_files(engine_kind: str) -> int:
    """Raise the limits of open files, and return the new soft limit.

    The soft limit is raised to the hard one; for mlx_lm the hard one is raised, too, if it is low.

    Raises:
        LaunchError: too few files may be open, and this process may not raise the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = least_for(engine_kind)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        try:  # only a privileged process may
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, OSError):
            raise LaunchError(too_low(hard, engine_kind)) from None
        return wanted
    most = MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):  # macOS has a lower limit, which it does not report
        if soft < LEAST:
            raise LaunchError(too_low(soft, engine_kind)) from None
        return soft
    return most


def least_for(engine_kind: str) -> int:
    """Return the hard limit below which a server with this engine cannot work."""
    return MLX_LM_SETS if engine_kind == "mlx" else LEAST


def too_low(limit: int, engine_kind: str) -> str:
    """Return a message that says why a limit is too low and how to raise it."""
    wanted = least_for(engine_kind)
    why = " (mlx_lm asks for that when it is imported)" if engine_kind == "mlx" else ""
    return (
        f"only {limit} files may be open, and {wanted} are needed{why}; raise the hard limit:"
        f" ulimit -Hn {wanted}, LimitNOFILE={wanted} in a systemd unit, or --ulimit"
        f" nofile={wanted} of a container"
    )
