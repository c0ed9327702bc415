"""Numbers in fp16: as two columns of bytes among the codes of a token, or as the rows themselves.

A method that stores a number for each row (the size of a residual, a radius) then needs no coder of
its own: bit planes write any columns.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import FP16_LARGEST
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import FP16_SMALLEST, NoGain, root_mean_squares

BITS = (8, 8)  # of the two columns


def to_columns(values: np.ndarray) -> np.ndarray:
    """Packs fp32 (..., numbers) to uint8 (..., 2 * numbers).

    Values beyond the range of fp16 become its largest.
    """
    halves = np.clip(values, -FP16_LARGEST, FP16_LARGEST).astype("<f2")
    return np.ascontiguousarray(halves).view(np.uint8)


def from_columns(columns: np.ndarray) -> np.ndarray:
    """Unpacks uint8 (..., 2 * numbers) to fp32; damaged columns also give finite numbers."""
    halves = np.ascontiguousarray(columns).view("<f2").astype(np.float32)
    usual = np.where(np.isnan(halves), np.float32(0), halves)
    finite: np.ndarray = np.clip(usual, -FP16_LARGEST, FP16_LARGEST)
    return finite


class HalfRange(NoGain):
    """Does not scale rows; keeps those that fp16 cannot hold unquantised. Implements ``Gain``."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__(shape)
        self._sizes_of = shape
        self._largest = FP16_LARGEST / np.float32(2 * np.sqrt(shape.width))

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = root_mean_squares(stack, self._sizes_of)
        fits = (sizes == 0) | ((sizes >= 2 * FP16_SMALLEST) & (sizes <= self._largest))
        return np.ones_like(sizes), ~fits
