"""Fits a quantiser's levels to observed values, where the levels for normal values are not optimal.

Lloyd's iteration (1957) on histograms of sizes: a boundary lies half-way between two levels, a
level is the mean of its cell. All components of a unit that have the same number of bits share one
table: a single component has too few observed values.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.rows.lloyd_max import gauss_table
from kvstore.codecs.stages.integer_klt import MAX_BITS, NUM_MAGNITUDES

NUM_BINS = 1024
FURTHEST = 8.0  # deviations; larger sizes are counted as this one
LEAST_SEEN = 200  # observed values per level; with fewer, the levels for normal values are safer
ROUNDS = 50


class SizeCounts:
    """Histograms of the sizes of components of unit deviation, by unit and number of bits."""

    def __init__(self, bits: np.ndarray) -> None:
        """``bits``: integers (units, components)."""
        self._bits = bits.astype(np.int64)
        self._counts = np.zeros((len(bits), MAX_BITS + 1, NUM_BINS), np.int64)

    def add(self, components: np.ndarray) -> None:
        """Counts ``components``, fp32 (units, tokens, components)."""
        bins = np.minimum(np.abs(components) * (NUM_BINS / FURTHEST), NUM_BINS - 1).astype(np.int64)
        bins += (self._bits * NUM_BINS)[:, None]
        for counts, seen in zip(self._counts, bins, strict=True):
            counts += np.bincount(seen.reshape(-1), minlength=counts.size).reshape(counts.shape)

    def levels(self) -> np.ndarray:
        """Returns fp64 (units, MAX_BITS + 1, NUM_MAGNITUDES), ascending.

        Unused places at the end are zero.
        """
        levels = gauss_levels(len(self._counts))
        for unit, counts in zip(levels, self._counts, strict=True):
            for bits in range(1, MAX_BITS + 1):
                size = 1 << (bits - 1)
                if counts[bits].sum() >= LEAST_SEEN * size:
                    unit[bits, :size] = _fitted(unit[bits, :size], counts[bits])
        return levels


def gauss_levels(num_units: int) -> np.ndarray:
    """Returns the levels for normal values, in the shape of ``SizeCounts.levels``."""
    levels = np.zeros((num_units, MAX_BITS + 1, NUM_MAGNITUDES))
    for bits in range(1, MAX_BITS + 1):
        levels[:, bits, : 1 << (bits - 1)] = gauss_table(1 << bits).level_array
    return levels


def _fitted(levels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    middles = (np.arange(NUM_BINS) + 0.5) * (FURTHEST / NUM_BINS)
    for _ in range(ROUNDS):
        cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, middles)
        seen = np.bincount(cells, counts, len(levels))
        sums = np.bincount(cells, counts * middles, len(levels))
        levels = np.where(seen > 0, sums / np.maximum(seen, 1), levels)
    return levels
