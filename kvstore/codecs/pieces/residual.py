"""A second quantiser for what the first one missed; both codes side by side in one integer."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.pieces.seams import Quantiser


class Residual:
    """Implements ``Quantiser``; the second's code is shifted above the first's ``first_bits``."""

    def __init__(self, first: Quantiser, first_bits: int, second: Quantiser, scale: float) -> None:
        """``scale``: the deviation of what the first misses, for a second made for N(0, 1)."""
        self._first, self._second = first, second
        self._first_bits = first_bits
        self._scale = np.float32(scale)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        coarse = self._first.quantise(components)
        missed = components - self._first.restore(coarse)
        fine = self._second.quantise(missed / self._scale)
        codes: np.ndarray = coarse | fine << self._first_bits
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        coarse = self._first.restore(codes & ((1 << self._first_bits) - 1))
        missed = self._second.restore(codes >> self._first_bits)
        return coarse + missed * self._scale
