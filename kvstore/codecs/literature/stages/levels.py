"""Lloyd-Max levels for normal values: a component, over its deviation, becomes the nearest one."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.codecs.rows.lloyd_max import MAX_LEVELS, gauss_table


class LloydMax:
    """Takes the number of bounds below a value as its code. Implements ``Quantiser``."""

    def __init__(self, num_levels: np.ndarray, deviations: np.ndarray) -> None:
        """``num_levels``: integers, ``deviations``: floats, both (units, components).

        One level means that the component is not stored.
        """
        self._shape = num_levels.shape
        self._deviations = np.array(deviations, np.float32).reshape(-1)
        self._scales = 1 / np.maximum(self._deviations, np.float32(1e-12))
        numbers, kinds = np.unique(num_levels, return_inverse=True)
        self._kinds = kinds.reshape(-1).astype(np.int64)
        self._counts = numbers.astype(np.int64) - 1
        self._are_alike = len(numbers) == 1 and bool(
            (self._deviations == self._deviations[0]).all()
        )
        self._bounds = np.full((len(numbers), MAX_LEVELS), np.inf, np.float32)
        self._levels = np.zeros((len(numbers), MAX_LEVELS), np.float32)
        for kind, number in enumerate(numbers.tolist()):
            self._bounds[kind, : number - 1] = gauss_table(number).all_bounds()
            self._levels[kind, :number] = gauss_table(number).all_levels()

    def quantise(self, components: np.ndarray) -> np.ndarray:
        scales, kinds = self._scales, self._kinds
        if self._are_alike:  # then rows need not be components
            rows = np.ascontiguousarray(components).reshape(-1, components.shape[2])
            scales, kinds = np.full(len(rows), scales[0]), np.zeros(len(rows), np.int64)
        else:
            rows = self._rows(components)
        codes = np.zeros(rows.shape, np.uint8)
        fast = compiled_stages()
        (fast.quantise_levels if fast else _quantise)(
            rows, scales, kinds, self._bounds, self._counts, codes
        )
        return codes.reshape(components.shape) if self._are_alike else self._stack(codes)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        rows = self._rows(codes)
        out = np.empty(rows.shape, np.float32)
        fast = compiled_stages()
        known = (self._kinds, self._levels, self._counts)
        (fast.restore_levels if fast else _restore)(rows, self._deviations, *known, out)
        return self._stack(out)

    def _rows(self, stack: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(stack.swapaxes(1, 2))
        return rows.reshape(len(self._kinds), stack.shape[1])

    def _stack(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(*self._shape, rows.shape[1]).swapaxes(1, 2)


def _quantise(
    rows: np.ndarray,
    scales: np.ndarray,
    kinds: np.ndarray,
    bounds: np.ndarray,
    counts: np.ndarray,
    codes: np.ndarray,
) -> None:
    for kind, count in enumerate(counts.tolist()):
        chosen = kinds == kind
        values = rows[chosen] * scales[chosen, None]
        below = np.zeros(values.shape, np.uint8)
        for bound in bounds[kind, :count]:
            below += values > bound
        codes[chosen] = below


def _restore(
    codes: np.ndarray,
    deviations: np.ndarray,
    kinds: np.ndarray,
    levels: np.ndarray,
    counts: np.ndarray,
    out: np.ndarray,
) -> None:
    for kind, count in enumerate(counts.tolist()):
        chosen = kinds == kind
        values = levels[kind][np.minimum(codes[chosen], count)]
        out[chosen] = values * deviations[chosen, None]


class Sign:
    """Keeps the sign, two levels of equal size; code 1 is positive. Implements ``Quantiser``."""

    def __init__(self, size: float | None = None) -> None:
        """``size``: the value of a bit; by default the mean size of a standard normal variable."""
        self._size = np.float32(gauss_table(2).levels[0] if size is None else size)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        return (components > 0).astype(np.uint8)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return np.where(codes > 0, self._size, -self._size)
