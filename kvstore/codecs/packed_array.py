"""K or V of one layer that is packed already, where the store expects an array.

An engine may keep its *live* cache packed in a row codec's own bytes. To save it, nothing needs to
be encoded; to wake it, nothing needs to be decoded. This array carries such rows through the store:
it can be sliced by tokens, copied and written to like the numpy array in whose place it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.rotated_rows import RotatedRows
from kvstore.codecs.rows import RowFormat
from kvstore.shapes import NUMPY_DTYPES, DType, KVLayout, KVPair

# Heads, tokens.
Slices: TypeAlias = tuple[slice, slice]


@dataclass(frozen=True, eq=False)
class PackedArray:
    """(num_kv_heads, num_tokens, dim) values of the engine's ``dtype``, row by row.

    A row whose scale is zero is kept as it is, in ``exact``; of every other row ``exact`` says
    nothing, and is memory that was never touched.
    """

    rows: RowFormat
    dtype_name: DType
    codes: np.ndarray  # uint8 (num_kv_heads, num_tokens, packed_nbytes)
    scales: np.ndarray  # (num_kv_heads, num_tokens)
    exact: np.ndarray  # uint16 (num_kv_heads, num_tokens, dim)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.exact.shape

    @property
    def dtype(self) -> np.dtype:
        return NUMPY_DTYPES[self.dtype_name]

    @property
    def is_exact(self) -> bool:
        """No row is packed."""
        return not self.scales.any()

    def __getitem__(self, where: Slices) -> PackedArray:
        """A view."""
        return self._with(self.codes[where], self.scales[where], self.exact[where])

    def __setitem__(self, everywhere: Any, values: PackedArray | np.ndarray) -> None:
        """Only ``[...]``. An array of the engine's dtype is kept as it is, in 16 bits."""
        assert everywhere is Ellipsis
        if not isinstance(values, PackedArray):
            self.scales[...] = 0
            self.exact[...] = floats.to_stored(values, self.dtype_name)
            return
        self.codes[...] = values.codes
        self.scales[...] = values.scales
        kept = values.scales == 0
        self.exact[kept] = values.exact[kept]

    def fill(self, value: float) -> None:
        self[...] = np.full(self.shape, value, self.dtype)

    def copy(self) -> PackedArray:
        copied = empty_packed(self.rows, self.dtype_name, self.shape)
        copied[...] = self
        return copied

    def view(self, dtype: Any) -> np.ndarray:
        return self.__array__().view(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Unpacked, with numpy; for looking at."""
        values = np.array(floats.from_stored(self.exact, self.dtype_name))
        packed = self.scales != 0
        if packed.any():
            rows = self.rows.unpack(self.codes[packed], self.scales[packed], self.shape[2])
            values[packed] = floats.narrow(rows, self.dtype_name)
        return values if dtype is None else values.astype(dtype)

    def _with(self, codes: np.ndarray, scales: np.ndarray, exact: np.ndarray) -> PackedArray:
        return PackedArray(self.rows, self.dtype_name, codes, scales, exact)


def empty_packed(rows: RowFormat, dtype: DType, shape: tuple[int, ...]) -> PackedArray:
    """Rows of no meaning, all marked as kept."""
    heads, num_tokens, dim = shape
    return PackedArray(
        rows,
        dtype,
        np.empty((heads, num_tokens, rows.packed_nbytes(dim)), np.uint8),
        np.zeros((heads, num_tokens), rows.scale_dtype),
        np.empty(shape, np.uint16),
    )


class PackedLayout(KVLayout, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layout of a cache that is kept packed: runs of it are made of ``PackedArray``."""

    num_bits: int

    @property
    def rows(self) -> RotatedRows:
        return RotatedRows(self.num_bits)

    @property
    def bytes_per_token(self) -> int:
        """Of a packed token, which nearly all are."""
        rows, scale = self.rows, self.rows.scale_dtype.itemsize
        sides = ((x.num_kv_heads, dim) for x in self.layers for dim in (x.head_dim, x.value_dim))
        return sum(heads * (rows.packed_nbytes(dim) + scale) for heads, dim in sides)

    def empty(self, num_tokens: int) -> list[KVPair]:
        return [
            cast(
                KVPair,
                tuple(
                    empty_packed(self.rows, self.dtype, (x.num_kv_heads, num_tokens, dim))
                    for dim in (x.head_dim, x.value_dim)
                ),
            )
            for x in self.layers
        ]
