"""What this machine can do, as LLVM names it; the same for all of a process's life."""

from __future__ import annotations

import functools
from collections.abc import Set

import llvmlite.binding as llvm


@functools.cache
def host_features() -> Set[str]:
    try:
        return {name for name, is_there in llvm.get_host_cpu_features().items() if is_there}
    except RuntimeError:  # not every system says
        return set()
