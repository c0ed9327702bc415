"""RVQ: a residual quantiser of one to three bits per stage.

Idea: after signs and Hadamard, the nearest of the best levels of a normal variable, then, in as
many bits, a level of the error that it leaves. The error is assumed to be Laplacian, and its levels
are the best ones of that variable. With one bit each, both levels are signs.
Formula: x is restored as n_i + sqrt(e) l_j, where e is the mean squared error of the levels n; with
one bit as s1 E|n| + s2 sqrt(1 - 2 / pi) / sqrt(2), with the signs s1 and s2.
Size: 2 b + 16 / D bits.
Project: VeloxQuant, one of the projects from which this one grew.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines, equal_bits
from kvstore.codecs.literature.stages.rotated import rotated
from kvstore.codecs.rows.lloyd_max import gauss_error, gauss_table
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape


def rvq(bits: int = 1) -> Codec:
    """Makes the preset ``rvq`` with ``bits`` for each of its two stages."""
    rows = functools.partial(_two_stages, bits=bits)
    return StackCodec("rvq.1", HeadPipelines(rows, rows), least_bits=(2 * bits, 2 * bits))


class Levels:
    """Takes the nearest of a few levels, the same for all components. Implements ``Quantiser``."""

    def __init__(self, levels: np.ndarray) -> None:
        """``levels``: floats (levels,), ascending."""
        self._levels = levels.astype(np.float32)
        self._bounds = (self._levels[1:] + self._levels[:-1]) / 2

    def quantise(self, components: np.ndarray) -> np.ndarray:
        codes = np.zeros(components.shape, np.uint8)
        for bound in self._bounds:
            codes += components > bound
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        restored: np.ndarray = self._levels[codes]
        return restored


def laplace_levels(num_levels: int) -> np.ndarray:
    """Returns the best levels of a Laplacian variable of unit variance, fp64 (num_levels,).

    Sullivan (1996): beyond any bound, an exponential variable is distributed as from zero on, so
    the best levels above the first are those of one level less. ``num_levels`` is even.
    """
    upper = np.ones(1)  # of an exponential variable of mean one
    while len(upper) < num_levels // 2:
        bound, last = float(upper[0]), 0.0
        while abs(bound - last) > 1e-12:  # half-way between the mean below it and the next level
            last, bound = bound, float(upper[0]) + 1 - bound / math.expm1(bound)
        upper = np.concatenate([[1 - bound / math.expm1(bound)], bound + upper])
    upper = upper / math.sqrt(2)
    return np.concatenate([-upper[::-1], upper])


class Residual:
    """Quantises the error that a first quantiser leaves. Implements ``Quantiser``.

    One integer holds both codes: the second above the first, ``first_bits`` each.
    """

    def __init__(self, first: Levels, first_bits: int, second: Levels, scale: float) -> None:
        """``scale``: the deviation of the first's error, for a second made for N(0, 1)."""
        self._first, self._second = first, second
        self._first_bits = first_bits
        self._scale = np.float32(scale)
        self._levels = self._restored(np.arange(1 << 2 * first_bits))

    def quantise(self, components: np.ndarray) -> np.ndarray:
        coarse = self._first.quantise(components)
        missed = components - self._first.restore(coarse)
        fine = self._second.quantise(missed / self._scale)
        codes: np.ndarray = coarse | fine << self._first_bits
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        restored: np.ndarray = self._levels[codes]
        return restored

    def _restored(self, codes: np.ndarray) -> np.ndarray:
        coarse = self._first.restore(codes & ((1 << self._first_bits) - 1))
        missed = self._second.restore(codes >> self._first_bits)
        return coarse + missed * self._scale


def _two_stages(shape: StackShape, bits: int) -> Pipeline:
    number = 1 << bits
    normal, missed = Levels(gauss_table(number).all_levels()), gauss_error(number) ** 0.5
    residual = Residual(normal, bits, Levels(laplace_levels(number)), missed)
    return rotated(shape, residual, equal_bits(shape, 2 * bits))
