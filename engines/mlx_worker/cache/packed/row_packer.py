"""The seam between a packed live cache and the code that packs its rows.

The arithmetic is ``kvstore.codecs.rows.rotated_rows``, byte for byte, so rows packed here may
go into the cold store unchanged, and rows from the store may be used unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import mlx.core as mx

from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.shapes import DType


@dataclass(frozen=True)
class RowKind:
    """The format of the rows of one side (K or V) of a model's layers."""

    num_bits: int
    dim: int
    stored: DType  # what a row is before it is packed: bfloat16, or float16 in an fp16 engine

    @property
    def format(self) -> RotatedRows:
        return RotatedRows(self.num_bits)

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float16 if self.stored == "float16" else mx.bfloat16

    @property
    def packed_nbytes(self) -> int:
        """Bytes of one packed row, its scale included."""
        return self.format.packed_nbytes(self.dim) + self.format.scale_dtype.itemsize


class RowPacker(Protocol):
    """Packs and unpacks rows of one kind. Stateless once made; belongs to the owner thread."""

    @property
    def kind(self) -> RowKind: ...

    def pack(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Pack (..., dim) of the stored dtype.

        Returns codes, uint8 (..., num_bits * dim / 8), and scales, bit patterns of fp16 as uint16
        (...). A scale of zero means that the row cannot be packed.
        """

    def unpack(self, codes: mx.array, scales: mx.array) -> mx.array:
        """Unpack to (..., dim) of the stored dtype. Rows whose scale is zero become zero."""


class NeverCopied:
    """Stays one object when mlx_lm copies caches deeply, as it does to split a batch.

    For classes whose objects never change.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
