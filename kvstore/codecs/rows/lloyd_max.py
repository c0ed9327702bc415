"""The best scalar quantiser of a standard normal variable, and the best number of its levels.

Joel Max (1960), Stuart Lloyd (1957/1982): a boundary lies half-way between two levels, a level is
the mean of its cell. For the normal distribution both have closed forms, so the tables are computed
(by Newton's method) rather than copied. They are part of the wire format: the tests pin them. No
value is so close to the middle between two float32 numbers that a different libm could change it.
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

MAX_LEVELS = 256
MIN_SPHERE_DIM = 4


@dataclass(frozen=True)
class GaussTable:
    """The upper half of a symmetric quantiser of N(0, 1).

    With an odd number of levels, the one at zero is not in ``levels``, and the first of ``bounds``
    lies between it and the first of ``levels``.
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
        """Return the levels of both halves, fp32 (num_levels,), ascending."""
        return _mirrored(self.level_array, has_zero=self.is_odd)

    def all_bounds(self) -> np.ndarray:
        """Return the bounds of both halves, fp32 (num_levels - 1,), ascending.

        The code of a value is the number of bounds below it.
        """
        return _mirrored(self.bound_array, has_zero=not self.is_odd)


def _mirrored(upper: np.ndarray, has_zero: bool) -> np.ndarray:
    return np.concatenate([-upper[::-1], np.zeros(int(has_zero), np.float32), upper])


@functools.cache
def gauss_table(num_levels: int) -> GaussTable:
    """Return the table of ``num_levels`` levels.

    Raises ``ValueError`` unless ``num_levels`` is 1 to 256.
    """
    if not 1 <= num_levels <= MAX_LEVELS:
        raise ValueError(f"{num_levels} levels where 1..{MAX_LEVELS} are possible")
    return _table(_high_rate_levels(num_levels), num_levels % 2 == 1, _Law())


@functools.cache
def sphere_table(num_levels: int, dim: int) -> GaussTable:
    """Return the best levels for an element of a random direction, times sqrt(dim).

    An element of a rotated row of ``dim`` values has exactly this distribution; its limit is the
    normal distribution. No codec here uses it: from 64 values on, it reduces the error by less than
    1 %.

    Raises ``ValueError`` unless ``num_levels`` is 1 to 256 and ``dim`` at least 4.
    """
    if not 1 <= num_levels <= MAX_LEVELS or dim < MIN_SPHERE_DIM:
        raise ValueError(f"{num_levels} levels of {dim} values; 1..{MAX_LEVELS} of 4 or more")
    # Normal levels, compressed so that the outermost one lies inside the sphere.
    levels = np.array(gauss_table(num_levels).levels)
    radius = math.sqrt(dim)
    return _table(radius * np.tanh(levels / radius), num_levels % 2 == 1, _Law(dim))


def _table(levels: np.ndarray, is_odd: bool, law: _Law) -> GaussTable:
    change = 1.0 if len(levels) else 0.0
    while change > 1e-11:  # a step doubles the correct digits: only rounding is left then
        step = _newton_step(levels, is_odd, law)
        change = float(np.abs(step).max())
        levels = levels - step
    return GaussTable(_rounded(levels), _rounded(_midpoints(levels, is_odd)))


def gauss_error(num_levels: int) -> float:
    """Return the mean squared error of the table on N(0, 1)."""
    table = gauss_table(num_levels)
    levels = np.array(table.levels)
    edges, law = _edges(levels, table.is_odd), _Law()
    shares = law.above(edges[:-1]) - law.above(edges[1:])
    return float(1 - 2 * np.sum(levels * levels * shares))


def _high_rate_levels(num_levels: int) -> np.ndarray:
    """Return the limit for many levels: quantiles of a normal variable, sqrt(3) times as wide.

    Panter and Dite (1951).
    """
    wide = NormalDist(0, math.sqrt(3))
    ranks = range(num_levels - num_levels // 2, num_levels)
    return np.array([wide.inv_cdf((rank + 0.5) / num_levels) for rank in ranks])


def _newton_step(levels: np.ndarray, is_odd: bool, law: _Law) -> np.ndarray:
    """Return a step towards levels that are the means of their cells.

    Lloyd's own steps converge far too slowly at 256 levels.
    """
    edges = _edges(levels, is_odd)
    low, high = edges[:-1], edges[1:]
    mass = law.above(low) - law.above(high)
    mean = (law.moment(low) - law.moment(high)) / mass
    by_low = (mean - low) * law.density(low) / mass / 2  # of a mean, by the level left of its cell
    by_high = np.append((high[:-1] - mean[:-1]) * law.density(high[:-1]) / mass[:-1] / 2, 0.0)
    fixed = np.append(0.0 if not is_odd else by_low[0], by_low[1:])  # the edge at zero stays
    slopes = np.diag(1 - fixed - by_high) - np.diag(by_low[1:], -1) - np.diag(by_high[:-1], 1)
    return np.linalg.solve(slopes, levels - mean)


def _edges(levels: np.ndarray, is_odd: bool) -> np.ndarray:
    """Return the edges of the cells of ``levels``: one more than there are levels."""
    inner = _midpoints(levels, is_odd)
    return np.concatenate([inner if is_odd else [0.0, *inner], [math.inf]])[-len(levels) - 1 :]


def _midpoints(levels: np.ndarray, is_odd: bool) -> np.ndarray:
    points = np.concatenate([[0.0], levels]) if is_odd else levels
    return (points[1:] + points[:-1]) / 2


@dataclass(frozen=True)
class _Law:
    """The distribution of an element of a random direction, times sqrt(dim); its variance is one.

    Its density is proportional to (1 - x^2 / dim)^((dim - 3) / 2). ``dim`` 0: its limit, the normal
    distribution. Arguments: fp64 (values,), may be infinite.
    """

    dim: int = 0

    def density(self, x: np.ndarray) -> np.ndarray:
        if not self.dim:
            return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return self._factor * self._left(x) ** ((self.dim - 3) / 2)

    def moment(self, x: np.ndarray) -> np.ndarray:
        """Return the integral of ``t * density(t)`` over ``t`` beyond each ``x``."""
        if not self.dim:
            return self.density(x)
        return self.density(x) * self._left(x) * self.dim / (self.dim - 1)

    def above(self, x: np.ndarray) -> np.ndarray:
        """Return the probability of a value beyond each ``x``, 0 or larger.

        On a sphere, from its end over angles, by Gauss and Legendre.
        """
        if not self.dim:
            return np.array([math.erfc(value / math.sqrt(2)) / 2 for value in x])
        angles = np.arccos(np.clip(x / math.sqrt(self.dim), -1, 1))
        nodes, weights = np.polynomial.legendre.leggauss(200)
        points = angles[:, None] / 2 * (nodes + 1)
        heights = np.sin(points) ** (self.dim - 2) @ weights
        return self._factor * math.sqrt(self.dim) * heights * angles / 2

    @property
    def _factor(self) -> float:
        logarithm = math.lgamma(self.dim / 2) - math.lgamma((self.dim - 1) / 2)
        return math.exp(logarithm) / math.sqrt(math.pi * self.dim)

    def _left(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(1 - np.minimum(x * x, self.dim) / self.dim, 0)


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(np.float32(v)) for v in values)


def greedy_bits(variances: np.ndarray, total: int, most: int = 8) -> np.ndarray:
    """Give one bit after another to the component whose error shrinks most by it.

    ``variances``: floats of any shape, times the weight of errors. Returns int64 of that shape,
    each 0 to ``most``, with the sum ``total``. Raises ``ValueError`` if that is impossible.
    """
    errors = [gauss_error(1 << bits) for bits in range(most + 1)]
    gains = [before - after for before, after in zip(errors, errors[1:], strict=False)]
    flat = np.asarray(variances, np.float64).reshape(-1)
    if total > most * len(flat):
        raise ValueError(f"{total} bits for {len(flat)} components of {most} at most")
    bits = np.zeros(len(flat), np.int64)
    heap = [(-value * gains[0], number) for number, value in enumerate(flat)]
    heapq.heapify(heap)
    for _ in range(total):
        _, number = heap[0]
        bits[number] += 1
        if bits[number] == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-flat[number] * gains[bits[number]], number))
    return bits.reshape(np.shape(variances))
