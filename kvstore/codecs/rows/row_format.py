"""The interface between a payload and the arithmetic that packs one row.

A row is one head's vector of one token: ``dim`` values of 16 bits. A row format turns it into a
fixed number of packed bytes and one scale, with numpy, in a fixed order of operations: that is the
definition. ``kernels`` does the same faster, and must give the same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np


class RowFormat(Hashable, Protocol):
    """The arithmetic of one preset. Stateless; one instance per preset."""

    @property
    def scale_dtype(self) -> np.dtype:
        """The dtype of a row's scale, in the byte order of the payload."""

    def supports(self, dim: int) -> bool:
        """Returns whether rows of ``dim`` values can be packed."""

    def packed_nbytes(self, dim: int) -> int:
        """Returns the bytes of one row, without its scale."""

    def pack(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Packs rows, fp32 (num_rows, dim), contiguous.

        Returns uint8 (num_rows, packed_nbytes) and scales (num_rows,). A scale of zero means that
        this row cannot be packed (all zero, infinite, NaN, or out of the scale's range) and has to
        be stored unquantised; its packed bytes have no meaning.
        """

    def unpack(self, packed: np.ndarray, scales: np.ndarray, dim: int) -> np.ndarray:
        """Unpacks rows of ``pack`` to fp32 (num_rows, dim), not yet rounded to 16 bits."""

    def are_all_packed(self, scales: np.ndarray) -> bool:
        """Returns whether every scale (num_rows,) is one that ``pack`` writes for a packed row.

        That is the usual case, and takes one pass over the scales instead of several.
        """

    def are_scales(self, scales: np.ndarray) -> bool:
        """Returns whether every scale (num_rows,) is zero or one that ``pack`` can write."""
