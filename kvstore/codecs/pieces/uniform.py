"""One step for all components, and values that lean towards zero.

With entropy-coded integers and equal steps the optimal number of bits for each component comes out
by itself: it *is* reverse water-filling (Berger 1971). Within a cell small values are likelier than
large ones, so a code stands for its cell's centroid, a little below the middle.
"""

from __future__ import annotations

import numpy as np

NUM_SHIFTS = 4  # codes of size 0, 1, 2, and 3 or more
LARGEST_CODE = 32767


class UniformStep:
    """Implements ``Quantiser``; codes are int16."""

    def __init__(self, step: float, shifts: np.ndarray, rounding: float = 0.5) -> None:
        """``shifts``: fp32 (units, components, NUM_SHIFTS), in steps.

        ``rounding`` below one half widens the cell of zero (a dead zone).
        """
        self._step = np.float32(step)
        self._shifts = np.ascontiguousarray(shifts, np.float32)
        self._rounding = np.float32(rounding)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        scaled = components * (1 / self._step)
        if self._rounding == 0.5:
            codes = np.rint(scaled)
        else:
            codes = np.sign(scaled) * np.floor(np.abs(scaled) + self._rounding)
        return np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int16)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        sizes = np.minimum(np.abs(codes), NUM_SHIFTS - 1)
        units, _, components = codes.shape
        rows = np.arange(units * components).reshape(units, 1, components)
        shifts = self._shifts.reshape(-1)[rows * NUM_SHIFTS + sizes]
        restored: np.ndarray = (codes + np.sign(codes) * shifts) * self._step
        return restored
