"""What this machine can do, as LLVM names it; the same for all of a process's life."""

from __future__ import annotations

import functools
import os
from collections.abc import Set

import llvmlite.binding as llvm


@functools.cache
def host_features() -> Set[str]:
    """Without what ``NUMBA_CPU_FEATURES`` takes away: numba compiles for no more than that."""
    if os.environ.get("NUMBA_CPU_NAME"):  # code for another processor; who knows what it has
        return set()
    try:
        found = {name for name, is_there in llvm.get_host_cpu_features().items() if is_there}
    except RuntimeError:  # not every system says
        return set()
    told = os.environ.get("NUMBA_CPU_FEATURES", "").split(",")
    return found - {item[1:] for item in told if item.startswith("-")}
