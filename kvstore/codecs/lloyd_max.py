"""The best scalar quantiser of a standard normal variable, by Lloyd's iteration.

Joel Max (1960), Stuart Lloyd (1957/1982): a boundary lies half-way between two levels, a level is
the mean of its cell. For the normal distribution both steps have closed forms, so the tables are
computed rather than copied. They are part of the wire format: the tests pin them, and none of the
values lies close enough to the middle of two float32 for a different libm to change it.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GaussTable:
    """Positive half of a symmetric quantiser of N(0, 1)."""

    levels: tuple[float, ...]  # exact float32 values, ascending
    bounds: tuple[float, ...]  # exact float32 values between them, one fewer

    @property
    def level_array(self) -> np.ndarray:
        return np.array(self.levels, np.float32)

    @property
    def bound_array(self) -> np.ndarray:
        return np.array(self.bounds, np.float32)


@functools.cache
def gauss_table(num_levels: int) -> GaussTable:
    """The table of ``num_levels`` levels (an even number), of which half are positive."""
    half = num_levels // 2
    levels = [(2 * k + 1) / num_levels for k in range(half)]
    change = 1.0
    while change > 1e-15:
        edges = [0.0, *_midpoints(levels), math.inf]
        moved = [_mean(a, b) for a, b in itertools.pairwise(edges)]
        change = max(abs(a - b) for a, b in zip(levels, moved, strict=True))
        levels = moved
    return GaussTable(_rounded(levels), _rounded(_midpoints(levels)))


def _midpoints(levels: list[float]) -> list[float]:
    return [(a + b) / 2 for a, b in itertools.pairwise(levels)]


def _mean(a: float, b: float) -> float:
    """Mean of a standard normal variable that is known to lie in (a, b)."""
    return (_density(a) - _density(b)) / (_below(b) - _below(a))


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _below(x: float) -> float:
    return math.erf(x / math.sqrt(2)) / 2


def _rounded(values: list[float]) -> tuple[float, ...]:
    return tuple(float(np.float32(v)) for v in values)
