"""The best scalar quantiser of a standard normal variable.

Joel Max (1960), Stuart Lloyd (1957/1982): a boundary lies half-way between two levels, a level is
the mean of its cell. For the normal distribution both have closed forms, so the tables are computed
(by Newton's method) rather than copied. They are part of the wire format: the tests pin them, and
none of the values lies close enough to the middle of two float32 for a different libm to change it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

MAX_LEVELS = 256


@dataclass(frozen=True)
class GaussTable:
    """The upper half of a symmetric quantiser of N(0, 1).

    With an odd number of levels the one at zero is left out of ``levels``, and the first of
    ``bounds`` lies between it and the first of ``levels``.
    """

    levels: tuple[float, ...]  # exact float32 values, ascending
    bounds: tuple[float, ...]  # exact float32 values between them

    @property
    def level_array(self) -> np.ndarray:
        """The levels above zero, fp32 (levels,), ascending."""
        return np.array(self.levels, np.float32)

    @property
    def bound_array(self) -> np.ndarray:
        """The bounds between them, fp32 (bounds,), ascending."""
        return np.array(self.bounds, np.float32)

    @property
    def is_odd(self) -> bool:
        """True if one of the levels is zero."""
        return len(self.bounds) == len(self.levels)

    def all_levels(self) -> np.ndarray:
        """Returns the levels of both halves, fp32 (num_levels,), ascending."""
        upper = self.level_array
        centre = np.zeros(1 if self.is_odd else 0, np.float32)
        return np.concatenate([-upper[::-1], centre, upper])

    def all_bounds(self) -> np.ndarray:
        """Returns the bounds of both halves, fp32 (num_levels - 1,), ascending.

        The code of a value is the number of bounds below it.
        """
        upper = self.bound_array
        centre = np.zeros(0 if self.is_odd else 1, np.float32)
        return np.concatenate([-upper[::-1], centre, upper])


@functools.cache
def gauss_table(num_levels: int) -> GaussTable:
    """Returns the table of ``num_levels`` levels.

    Raises ``ValueError`` unless they are 1 to 256.
    """
    if not 1 <= num_levels <= MAX_LEVELS:
        raise ValueError(f"{num_levels} levels where 1..{MAX_LEVELS} are possible")
    levels = _high_rate_levels(num_levels)
    change = 1.0 if len(levels) else 0.0
    while change > 1e-11:  # a step doubles the digits: what is left then is rounding
        step = _newton_step(levels, num_levels % 2 == 1)
        change = float(np.abs(step).max())
        levels = levels - step
    return GaussTable(_rounded(levels), _rounded(_midpoints(levels, num_levels % 2 == 1)))


def gauss_error(num_levels: int) -> float:
    """Returns the mean squared error of the table on N(0, 1)."""
    table = gauss_table(num_levels)
    levels = np.array(table.levels)
    edges = _edges(levels, table.is_odd)
    return float(1 - 2 * np.sum(levels * levels * (_above(edges[:-1]) - _above(edges[1:]))))


def _high_rate_levels(num_levels: int) -> np.ndarray:
    """Returns the levels that many levels tend to: quantiles of a normal variable, sqrt(3) as wide.

    Panter and Dite (1951).
    """
    wide = NormalDist(0, math.sqrt(3))
    ranks = range(num_levels - num_levels // 2, num_levels)
    return np.array([wide.inv_cdf((rank + 0.5) / num_levels) for rank in ranks])


def _newton_step(levels: np.ndarray, is_odd: bool) -> np.ndarray:
    """Returns a step towards levels that are the means of their cells.

    Lloyd's own steps take forever at 256 levels.
    """
    edges = _edges(levels, is_odd)
    low, high = edges[:-1], edges[1:]
    mass = _above(low) - _above(high)
    mean = (_density(low) - _density(high)) / mass
    by_low = (mean - low) * _density(low) / mass / 2  # of a mean, by the level left of an edge
    by_high = np.append((high[:-1] - mean[:-1]) * _density(high[:-1]) / mass[:-1] / 2, 0.0)
    fixed = np.append(0.0 if not is_odd else by_low[0], by_low[1:])  # the edge at zero stays
    slopes = np.diag(1 - fixed - by_high) - np.diag(by_low[1:], -1) - np.diag(by_high[:-1], 1)
    step: np.ndarray = np.linalg.solve(slopes, levels - mean)
    return step


def _edges(levels: np.ndarray, is_odd: bool) -> np.ndarray:
    """Returns the edges of the cells of ``levels``, one more than there are levels."""
    inner = _midpoints(levels, is_odd)
    return np.concatenate([inner if is_odd else [0.0, *inner], [math.inf]])[-len(levels) - 1 :]


def _midpoints(levels: np.ndarray, is_odd: bool) -> np.ndarray:
    points = np.concatenate([[0.0], levels]) if is_odd else levels
    middles: np.ndarray = (points[1:] + points[:-1]) / 2
    return middles


def _density(x: np.ndarray) -> np.ndarray:
    density: np.ndarray = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return density


def _above(x: np.ndarray) -> np.ndarray:
    """Returns the probability of a standard normal variable beyond each ``x``."""
    return np.array([math.erfc(value / math.sqrt(2)) / 2 for value in x])


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(np.float32(v)) for v in values)
