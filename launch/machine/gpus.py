"""The NVIDIA GPUs of this machine, as the driver's own tool reports them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Final

_COMMAND: Final = ("nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    free_bytes: int | None  # None: it has no memory of its own (GB10 shares the CPU's)


def find_gpus() -> list[Gpu]:
    """The GPUs, with their free memory; none where no driver answers."""
    try:
        run = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_PATIENCE_S)
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
