"""One step for all components, and values that lean towards zero.

With entropy-coded integers and equal steps, each component automatically gets the optimal number of
bits: this *is* reverse water-filling (Berger 1971). Within a cell, small values are likelier than
large ones, so a code stands for its cell's centroid, a little below the middle. Centroids are also
whole numbers, of fractions of a step, so that all later results are the same on every host.
"""

from __future__ import annotations

import numpy as np

NUM_SHIFTS = 4  # codes of size 0, 1, 2, and 3 or more
LARGEST_CODE = 32767
LARGEST_LEVEL = 32767
# The largest predicted level: a code is added to it, and can reach any level half as large.
LARGEST_EXPECTED = LARGEST_LEVEL // 2


class UniformStep:
    """Quantises all components by one step; codes are int16. Implements ``Quantiser``."""

    def __init__(self, step: float, levels: np.ndarray, rounding: float = 0.5) -> None:
        """``levels``: int16 (units, components, NUM_SHIFTS): the number of levels in a step, and
        the numbers added to codes of size 1, 2, and 3 or more.

        ``rounding`` below one half widens the cell of zero (a dead zone).
        """
        self._step = np.float32(step)
        self._levels = levels.astype(np.int32)
        self._rounding = np.float32(rounding)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        return self._codes(components * (1 / self._step))

    def quantise_beyond(
        self, unit: int, components: np.ndarray, expected: np.ndarray
    ) -> np.ndarray:
        """Returns the codes of one unit's prediction errors, int16 (tokens, components).

        ``components``: fp32 of the same shape. ``expected``: int32 levels (tokens, first
        components).
        """
        scaled = components * (1 / self._step)
        per_step = self._levels[unit, : expected.shape[1], 0]
        scaled[:, : expected.shape[1]] -= expected / np.maximum(per_step, 1).astype(np.float32)
        return self._codes(scaled)

    def _codes(self, scaled: np.ndarray) -> np.ndarray:
        if self._rounding == 0.5:
            codes = np.rint(scaled)
        else:
            codes = np.sign(scaled) * np.floor(np.abs(scaled) + self._rounding)
        limited: np.ndarray = np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int16)
        return limited

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """Returns int32 levels (units, tokens, components)."""
        return np.stack([self.restore_unit(unit, x) for unit, x in enumerate(codes)])

    def restore_unit(self, unit: int, codes: np.ndarray) -> np.ndarray:
        """Returns the int32 levels of one unit's codes, (tokens, components)."""
        per_step, *added = self._levels[unit].T
        sizes = np.abs(np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int32))
        sums = [np.zeros_like(per_step), *added]
        chosen = np.select([sizes == k for k in range(NUM_SHIFTS - 1)], sums[:-1], sums[-1])
        levels = np.minimum(sizes * per_step + chosen, LARGEST_LEVEL)
        restored: np.ndarray = np.where(codes < 0, -levels, levels)
        return restored
