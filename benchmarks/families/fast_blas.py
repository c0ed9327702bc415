"""Gives a benchmark that runs mlx in its own process the BLAS with which engines are started."""

from __future__ import annotations

import os
import sys

from launch.machine.blas import find_blas
from launch.machine.folders import default_cache_dir


def begin_with_blas(module: str) -> None:
    """Replace this process by ``python -m module`` with a fast BLAS preloaded.

    Returns if one is preloaded already, or none is found. mlx's own BLAS is slow.
    """
    blas = find_blas(os.environ, default_cache_dir(os.environ))
    if blas.env:
        again = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **blas.env})
