"""Multiplies rows of 16-bit integers by a matrix: exact, with the host's fastest instructions."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from kvstore.codecs.loops.compiled import compiled_module
from kvstore.codecs.stacks.fused import aligned

logger = logging.getLogger(__name__)

KERNELS: Final = "kvstore.codecs.kernels.units.word_products"


class Int16Products:
    """Products of int16 rows and matrices.

    Sums of 32 bits wrap around, so that their order does not matter.
    """

    def __init__(self, matrix: np.ndarray, live: np.ndarray) -> None:
        """``matrix``: int16 (units, components, width). ``live``: integers (units,): the number of
        components in use.
        """
        self._width, self._live = matrix.shape[2], live.tolist()
        self._kernels = compiled_module(KERNELS)
        rows = [x[:n] for x, n in zip(matrix, self._live, strict=True)]
        self._matrix, self._panels = rows, np.empty((0, 0, 0, 0), np.uint32)
        if self._kernels is None:
            return
        self._panels = self._panelled(self._kernels.COLUMNS)
        if self._agree():
            self._matrix = []  # as large as the panels, which contain it
        else:
            logger.warning("products of words are wrong on this host: using numpy")
            self._kernels, self._panels = None, self._panels[:0]

    @property
    def panels(self) -> np.ndarray:
        """The matrices as kernels take them, uint32 (units, panels, pairs, columns).

        Panels that a unit does not have are zero. No unit is there if numpy multiplies.
        """
        return self._panels

    def _panelled(self, columns: int) -> np.ndarray:
        """Returns all panels, in one array that begins at a line of the cache."""
        most, pairs = -(-max(self._live, default=0) // columns), -(-self._width // 2)
        whole = aligned(np.zeros((len(self._live), most, pairs, columns), np.uint32))
        for unit, matrix in zip(whole, self._matrix, strict=True):
            own = panels_of(matrix, columns)
            unit[: len(own)] = own
        return whole

    def _of(self, unit: int) -> np.ndarray:
        return self._panels[unit, : -(-self._live[unit] // self._panels.shape[3])]

    def sums(self, unit: int, rows: np.ndarray) -> np.ndarray:
        """Returns int32 (live components, tokens) for ``rows``, int16 (tokens, width), of one unit.

        Raises:
            ValueError: rows of another width, a defect in the caller.
        """
        if self._kernels is None:
            return self.reference(unit, rows)
        tokens, width = rows.shape
        if width != self._width:  # the kernel reads this many values
            raise ValueError(f"rows of {width} values, not {self._width}")
        each = self._kernels.TOKENS
        words = np.zeros((-(-tokens // each), each, -(-width // 2) * 2), np.int16)
        words.reshape(-1, words.shape[2])[:tokens, :width] = rows
        tiles = np.ascontiguousarray(words.view(np.uint32).swapaxes(1, 2))
        sums = np.empty((self._live[unit], tokens), np.int32)
        self._kernels.products(tiles, self._of(unit), sums)
        return sums

    def reference(self, unit: int, rows: np.ndarray) -> np.ndarray:
        """Returns the same sums with numpy: fp64 holds sums of that many products exactly."""
        if self._matrix:
            matrix = self._matrix[unit]
        else:
            matrix = _unpanelled(self._of(unit), self._live[unit], self._width)
        products: np.ndarray = np.matmul(matrix.astype(np.float64), rows.T.astype(np.float64))
        return products.astype(np.int64).astype(np.int32)

    def _agree(self) -> bool:
        """Returns whether kernels are right for a few components.

        A compiler must not be trusted with a cache.
        """
        tokens, width = 5, self._width
        numbers = np.arange(tokens * width) * 40503 % 65535 - 32767
        rows = numbers.reshape(tokens, width).astype(np.int16)
        unit = int(np.argmax(self._live))
        some = self._matrix[unit][::7].astype(np.int64)
        expected = np.matmul(some, rows.T.astype(np.int64)).astype(np.int32)
        return np.array_equal(self.sums(unit, rows)[::7], expected)


def panels_of(matrix: np.ndarray, columns: int) -> np.ndarray:
    """Returns pairs of neighbours in 32 bits, by panels: uint32 (panels, pairs, columns).

    ``matrix``: int16 (components, width). A panel has ``columns`` components.
    """
    components, width = matrix.shape
    num_panels = -(-components // columns)
    padded = np.zeros((num_panels * columns, -(-width // 2) * 2), np.int16)
    padded[:components, :width] = matrix
    pairs = padded.view(np.uint32).reshape(num_panels, columns, padded.shape[1] // 2)
    return aligned(pairs.swapaxes(1, 2))


def _unpanelled(panels: np.ndarray, components: int, width: int) -> np.ndarray:
    """Undoes ``panels_of``: int16 (components, width)."""
    rows = np.ascontiguousarray(panels.swapaxes(1, 2)).reshape(-1, panels.shape[1])
    return rows.view(np.int16)[:components, :width]
