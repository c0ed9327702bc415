"""RVQ: a residual quantiser of one bit per stage.

Idea: after signs and Hadamard, the sign of a component, then the sign of the error that it leaves.
The error is assumed to be Laplacian: its bit stands for the mean size of a Laplacian variable.
Formula: x is restored as s1 E|n| + s2 sqrt(1 - 2 / pi) / sqrt(2), with the signs s1 and s2.
Size: 2 + 16 / D bits.
Project: VeloxQuant, one of the projects from which this one grew.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.attention.planes import levels_of_planes
from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines, equal_bits
from kvstore.codecs.literature.stages.levels import Sign
from kvstore.codecs.literature.stages.rotated import rotated
from kvstore.codecs.rows.lloyd_max import gauss_error
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.sources import Source
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.planes import PackedPlanes


def rvq() -> Codec:
    """Makes the preset ``rvq``."""
    return StackCodec("rvq.1", HeadPipelines(_two_signs, _two_signs))


class Residual:
    """Quantises the error that a first quantiser leaves. Implements ``Quantiser``.

    One integer holds both codes: the second above the ``first_bits`` of the first.
    """

    def __init__(self, first: Sign, first_bits: int, second: Sign, scale: float) -> None:
        """``scale``: the deviation of the first's error, for a second made for N(0, 1)."""
        self._first, self._second = first, second
        self._first_bits = first_bits
        self._scale = np.float32(scale)
        self._levels = self._restored(np.arange(2 << first_bits))

    def quantise(self, components: np.ndarray) -> np.ndarray:
        coarse = self._first.quantise(components)
        missed = components - self._first.restore(coarse)
        fine = self._second.quantise(missed / self._scale)
        codes: np.ndarray = coarse | fine << self._first_bits
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        restored: np.ndarray = self._levels[codes]
        return restored

    def attended(self, planes: PackedPlanes) -> Source:
        return levels_of_planes(planes, self._levels)

    def _restored(self, codes: np.ndarray) -> np.ndarray:
        coarse = self._first.restore(codes & ((1 << self._first_bits) - 1))
        missed = self._second.restore(codes >> self._first_bits)
        return coarse + missed * self._scale


def _two_signs(shape: StackShape) -> Pipeline:
    laplacian = Sign(0.5**0.5)  # the mean size of a Laplacian variable of unit variance
    missed = gauss_error(2) ** 0.5
    return rotated(shape, Residual(Sign(), 1, laplacian, missed), equal_bits(shape, 2))
