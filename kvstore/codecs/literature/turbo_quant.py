"""TurboQuant: signs, Hadamard, and the best levels for the nearly normal components that result.

Idea: a rotated row has nearly normal components of one variance, for any row, so one table of
Lloyd-Max levels serves them all (TurboQuant-MSE). TurboQuant-prod spends the last bit on a sketch
of the error of the levels (see ``stages.vectors``), which makes products with a query unbiased.
Formula: code = level nearest to (H S x) sqrt(D) / |x|; ours keeps the norm that fits the levels
best (norm correction), which the paper lacks.
Size: ``tq1`` .. ``tq8``: b + 16 / D bits. ``tqprod``: b - 1 bits, one sign and the residual's norm,
b + 32 / D bits; with three bits its error is five times that of spending the third on levels.
Paper: TurboQuant, arXiv 2504.19874.
"""

from __future__ import annotations

import functools

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import (
    COLUMN_BITS,
    HeadPipelines,
    from_columns,
    to_columns,
)
from kvstore.codecs.literature.stages.levels import LloydMax, normal_levels, rotated
from kvstore.codecs.literature.stages.vectors import directions, sign_size
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape


def turbo_quant(num_bits: int) -> Codec:
    """Make the preset ``tq1``, ``tq2``, ``tq5``, ... of 1 to 8 bits."""
    return RowCodec(f"tq{num_bits}.1", RotatedRows(num_bits))


tq1, tq2, tq5, tq6, tq7, tq8 = (functools.partial(turbo_quant, n) for n in (1, 2, 5, 6, 7, 8))


def tqprod(bits: int = 3) -> Codec:
    """Make the preset ``tqprod``; one of its bits is for the sketch."""
    rows = functools.partial(_levels_and_sketch, level_bits=bits - 1)
    return StackCodec("tqprod.1", HeadPipelines(rows, rows), least_bits=(bits, bits))


class SketchedResidual:
    """Quantises, and sketches the error. Implements ``Quantiser``.

    The codes of a row have the sketch's sign above the bits of the first quantiser. After them
    come two columns of bytes with the size of the residual.
    """

    def __init__(self, first: LloydMax, first_bits: int, width: int) -> None:
        self._first, self._first_bits = first, first_bits
        self._directions = directions(width, width)
        self._size = sign_size(width, width)

    @property
    def bits(self) -> np.ndarray:
        """The bits of every column of codes, int64 (width + 2,)."""
        own = np.full(len(self._directions), self._first_bits + 1)
        return np.concatenate([own, COLUMN_BITS])

    def quantise(self, components: np.ndarray) -> np.ndarray:
        coarse = self._first.quantise(components)
        missed = components - self._first.restore(coarse)
        signs = (np.matmul(missed, self._directions.T) > 0).astype(np.uint8)
        sizes = np.sqrt(np.mean(missed * missed, axis=2, keepdims=True))
        codes = coarse | signs << self._first_bits
        return np.concatenate([codes, to_columns(sizes)], axis=2)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        width = len(self._directions)
        sizes = from_columns(codes[:, :, width:])
        signs = 2 * (codes[:, :, :width] >> self._first_bits).astype(np.float32) - 1
        coarse = self._first.restore(codes[:, :, :width] & ((1 << self._first_bits) - 1))
        missed = np.matmul(signs, self._directions) * (self._size * sizes)
        return coarse + missed


def _levels_and_sketch(shape: StackShape, level_bits: int) -> Pipeline:
    first = normal_levels(shape, 1 << level_bits)
    quantiser = SketchedResidual(first, level_bits, shape.width)
    return rotated(shape, quantiser, quantiser.bits)
