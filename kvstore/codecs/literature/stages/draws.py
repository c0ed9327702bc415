"""Standard normal numbers that are the same on every machine: matrices and samples of methods."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

UNIT = 2.0**-10  # draws are rounded to its multiples, which hides differences of libm's last bits


@functools.lru_cache(maxsize=32)
def normal_draws(name: str, rows: int, columns: int) -> np.ndarray:
    """Returns fp64 (rows, columns), read-only: SHAKE-256 of a name, then Box and Muller (1958)."""
    pairs = -(-rows * columns // 2)
    stream = hashlib.shake_256(f"thermocline {name} {rows} {columns}".encode()).digest(8 * pairs)
    sizes, turns = (np.frombuffer(stream, "<u4").reshape(2, pairs) + 0.5) / 2.0**32
    radii = np.sqrt(-2 * np.log(sizes))
    angles = 2 * np.pi * turns
    both = np.concatenate([radii * np.cos(angles), radii * np.sin(angles)])
    draws: np.ndarray = np.rint(both[: rows * columns] / UNIT) * UNIT
    draws = draws.reshape(rows, columns)
    draws.setflags(write=False)
    return draws
