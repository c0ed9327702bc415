"""Karhunen-Loeve transform: onto the principal axes of what was seen in calibration.

Components come out uncorrelated, with very uneven variances, and bits go where variance is. Axes of
components that never get a bit need not exist: a basis may have fewer columns than rows.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.reader import Reader


class Klt:
    """Implements ``Transform``, for bases with orthonormal columns."""

    def __init__(self, basis: np.ndarray) -> None:
        """``basis``: (units, width, components)."""
        self._basis = np.ascontiguousarray(basis, np.float32)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        # Component by component in memory, which is the order of the coders.
        components = np.matmul(self._basis.swapaxes(1, 2), stack.swapaxes(1, 2))
        return components.swapaxes(1, 2), b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        restored: np.ndarray = np.matmul(stack, self._basis.swapaxes(1, 2))
        return restored

    def note_nbytes(self, num_tokens: int) -> int:
        return 0
