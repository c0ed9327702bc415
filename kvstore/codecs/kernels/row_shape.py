"""What a kernel for rows is made for."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.codecs.kernels.features import host_features
from kvstore.codecs.rotated_rows import RotatedRows, size_of
from kvstore.codecs.rotation import Order, order_of
from kvstore.shapes import NUMPY_DTYPES, DType

MAX_LANES = 16  # of 32 bits
MIN_POWER = 4  # below it, and beyond MAX_BASE, the code gets long and the dimensions are rare
MAX_BASE = 28


@dataclass(frozen=True)
class RowShape:
    num_bits: int
    dim: int
    dtype: DType

    @property
    def order(self) -> Order:
        order = order_of(self.dim)
        assert order is not None
        return order

    @property
    def lanes(self) -> int:
        """Of 32 bits. A group of the rotation takes two vectors at least."""
        return min(self.order.power // 2, MAX_LANES)

    @property
    def wide_lanes(self) -> int:
        """The same of 16 bits. On small vectors, shuffles of more cost more than they save."""
        most = 2 * MAX_LANES if "avx512bw" in host_features() else MAX_LANES
        return min(self.order.power // 2, most)

    @property
    def row_nbytes(self) -> int:
        return self.dim * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def rows(self) -> RotatedRows:
        return RotatedRows(self.num_bits)

    @property
    def fraction(self) -> int:
        """Of a row's whole numbers, a one of bounds."""
        return size_of(self.dim) // self.rows.one

    @property
    def fits_16_bits(self) -> bool:
        """Sums of levels do, before the last butterfly."""
        return self.dim // 2 * int(self.rows.levels[-1]) < 1 << 15


def has_kernel(dim: int) -> bool:
    order = order_of(dim)
    return order is not None and order.power >= MIN_POWER and order.base <= MAX_BASE
