"""How much errors matter in each direction of each head, as a matrix before the KLT.

The errors of a head differ in weight: later tokens are sensitive to errors along some directions,
and not along others. Rows are multiplied by the root of the matrix of these sensitivities.
Afterwards an error of one size costs the same in any direction, so one step for all is right.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.stack_shape import StackShape


class HeadMetric:
    """Multiplies each head vector by its root. Implements ``Transform``."""

    def __init__(self, shape: StackShape, roots: np.ndarray) -> None:
        """``roots``: fp32 (units, sum of squared head dims): the symmetric matrix of each head
        vector of a unit, row by row.

        All are invertible.
        """
        self._columns, self._forward, self._backward = [], [], []
        first = 0
        for start, vector in zip(shape.starts, shape.units[0], strict=True):
            dim = vector.dim
            root = roots[:, first : first + dim * dim].reshape(-1, dim, dim).astype(np.float64)
            self._columns.append(slice(start, start + dim))
            self._forward.append(root.astype(np.float32))
            self._backward.append(np.linalg.inv(root).astype(np.float32))
            first += dim * dim

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        return self._mapped(stack, self._forward), b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return self._mapped(stack, self._backward)

    def note_nbytes(self, num_tokens: int) -> int:
        return 0

    def _mapped(self, stack: np.ndarray, matrices: list[np.ndarray]) -> np.ndarray:
        mapped = np.empty(stack.shape, np.float32)
        for columns, matrix in zip(self._columns, matrices, strict=True):
            np.matmul(stack[:, :, columns], matrix, out=mapped[:, :, columns])
        return mapped
