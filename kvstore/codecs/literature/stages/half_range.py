"""Applies no gain, for methods with numbers in fp16: rows beyond its range stay unquantised."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import FP16_LARGEST
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import FP16_SMALLEST, NoGain, root_mean_squares


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
