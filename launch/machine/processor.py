"""Finds out what this machine's processor can do."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def has_matrix_tiles(about: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if it multiplies tiles of matrices (AMX), which some kernels of vLLM's need."""
    with suppress(OSError):
        return " amx_tile" in about.read_text("utf-8")
    return False
