"""Lloyd-Max: each component, over its deviation, to the nearest of a normal variable's levels."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.lloyd_max import gauss_table


class LloydMax:
    """Implements ``Quantiser``; a code is the number of bounds below a value."""

    def __init__(self, num_levels: np.ndarray, deviations: np.ndarray) -> None:
        """Both (units, components). One level means that nothing is kept of a component."""
        self._num_levels = num_levels
        self._deviations = deviations.astype(np.float32)[:, None]
        self._scales = 1 / np.maximum(self._deviations, np.float32(1e-12))

    def quantise(self, components: np.ndarray) -> np.ndarray:
        scaled = (components * self._scales).swapaxes(1, 2)
        codes = np.zeros(scaled.shape, np.uint8)
        for num_levels in self._kinds():
            chosen = self._num_levels == num_levels
            values = scaled[chosen]
            counts = np.zeros(values.shape, np.uint8)
            for bound in gauss_table(num_levels).all_bounds():
                counts += values > bound
            codes[chosen] = counts
        return codes.swapaxes(1, 2)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        restored = np.zeros(codes.swapaxes(1, 2).shape, np.float32)
        for num_levels in self._kinds():
            chosen = self._num_levels == num_levels
            levels = gauss_table(num_levels).all_levels()
            restored[chosen] = levels[np.minimum(codes.swapaxes(1, 2)[chosen], num_levels - 1)]
        values: np.ndarray = restored.swapaxes(1, 2) * self._deviations
        return values

    def _kinds(self) -> list[int]:
        return [int(n) for n in np.unique(self._num_levels) if n > 1]
