"""The shape for which a row kernel is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.codecs.kernels.emit.emitter import MAX_LANES, host_features
from kvstore.codecs.rows.rotated_rows import RotatedRows, size_of
from kvstore.codecs.rows.rotation import Order, order_of
from kvstore.shapes import NUMPY_DTYPES, DType

MIN_POWER = 4  # below it, and beyond MAX_BASE, the code gets long and the dimensions are rare
MAX_BASE = 36


@dataclass(frozen=True)
class RowShape:
    """Bits, head dimension and dtype of rows, and the values derived from them on this host."""

    num_bits: int
    dim: int
    dtype: DType

    @property
    def order(self) -> Order:
        """The order of the Hadamard matrix."""
        order = order_of(self.dim)
        assert order is not None
        return order

    @property
    def is_mixed(self) -> bool:
        """True if a vector has several groups of the rotation: with one, it would be too short."""
        return self.order.base > 1 and self.order.power < 2 * MAX_LANES

    @property
    def lanes(self) -> int:
        """The lanes of 32 bits in a vector; a row has an even number of vectors."""
        return min((self.dim & -self.dim if self.is_mixed else self.order.power) // 2, MAX_LANES)

    @property
    def wide_lanes(self) -> int:
        """The lanes of 16 bits in a vector.

        On hosts with small vectors, more lanes would cost more shuffles than they save.
        """
        if self.is_mixed:
            return 2 * self.lanes
        most = 2 * MAX_LANES if "avx512bw" in host_features() else MAX_LANES
        return min(self.order.power // 2, most)

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row in the engine's dtype."""
        return self.dim * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def rows(self) -> RotatedRows:
        """The row format that numpy defines."""
        return RotatedRows(self.num_bits)

    @property
    def fraction(self) -> int:
        """The whole number in a row that corresponds to a one in the bounds."""
        return size_of(self.dim) // self.rows.one

    @property
    def fits_16_bits(self) -> bool:
        """True if sums of levels fit 16 bits before the last butterfly."""
        return self.dim // 2 * int(self.rows.levels[-1]) < 1 << 15


def has_kernel(dim: int) -> bool:
    """Return whether there are kernels for rows of ``dim`` elements."""
    order = order_of(dim)
    return order is not None and order.power >= MIN_POWER and order.base <= MAX_BASE
