"""One step for all components, and values that lean towards zero.

With entropy-coded integers and equal steps the optimal number of bits for each component comes out
by itself: it *is* reverse water-filling (Berger 1971). Within a cell small values are likelier than
large ones, so a code stands for its cell's centroid, a little below the middle.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.fast import compiled_pieces

NUM_SHIFTS = 4  # codes of size 0, 1, 2, and 3 or more
LARGEST_CODE = 32767


class UniformStep:
    """Implements ``Quantiser``; codes are int16."""

    def __init__(self, step: float, shifts: np.ndarray, rounding: float = 0.5) -> None:
        """``shifts``: fp32 (units, components, NUM_SHIFTS), in steps.

        ``rounding`` below one half widens the cell of zero (a dead zone).
        """
        self._step = np.float32(step)
        self._shifts = np.array(shifts, np.float32).reshape(-1, NUM_SHIFTS)
        self._rounding = np.float32(rounding)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        scaled = components * (1 / self._step)
        if self._rounding == 0.5:
            codes = np.rint(scaled)
        else:
            codes = np.sign(scaled) * np.floor(np.abs(scaled) + self._rounding)
        return np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int16)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        units, num_tokens, components = codes.shape
        rows = np.ascontiguousarray(codes.swapaxes(1, 2), np.int32)
        rows = rows.reshape(units * components, num_tokens)
        out = np.empty(rows.shape, np.float32)
        fast = compiled_pieces()
        (fast.restore_steps if fast else _restore)(rows, self._shifts, self._step, out)
        return out.reshape(units, components, num_tokens).swapaxes(1, 2)


def _restore(codes: np.ndarray, shifts: np.ndarray, step: np.float32, out: np.ndarray) -> None:
    sizes = np.minimum(np.abs(codes), NUM_SHIFTS - 1)
    towards = np.take_along_axis(shifts, sizes, axis=1)
    signs = np.sign(codes).astype(np.float32)
    np.multiply(codes.astype(np.float32) + signs * towards, step, out=out)
