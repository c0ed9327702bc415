"""Reads which instructions this machine has, by LLVM's names."""

from __future__ import annotations

import functools
import os
from collections.abc import Set

import llvmlite.binding as llvm


@functools.cache
def host_features() -> Set[str]:
    """The features of this machine, without those that ``NUMBA_CPU_FEATURES`` disables.

    numba compiles for these features only. Empty if they are not known.
    """
    if os.environ.get("NUMBA_CPU_NAME"):  # code for another processor, whose features are not known
        return set()
    try:
        found = {name for name, is_there in llvm.get_host_cpu_features().items() if is_there}
    except RuntimeError:  # not every system reports them
        return set()
    named = os.environ.get("NUMBA_CPU_FEATURES", "").split(",")
    return found - {item[1:] for item in named if item.startswith("-")}
