"""The layout and the arrays of a live cache that an engine keeps packed.

An engine may keep its *live* cache packed in a row codec's own bytes. Then nothing has to be
encoded to save it, and nothing decoded to wake it. ``PackedArray`` carries such rows through the
store: it can be sliced by tokens, copied and assigned to like the numpy array that it replaces.

The arithmetic of rows is imported only when bytes are counted, since other processes only ask
whether a layout is of this kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from kvstore.codecs import floats
from kvstore.shapes import NUMPY_DTYPES, DType, KVLayout, KVPair

if TYPE_CHECKING:
    from kvstore.codecs.rows.rotated_rows import RotatedRows
    from kvstore.codecs.rows.row_format import RowFormat

# Heads, tokens.
Slices: TypeAlias = tuple[slice, slice]


@dataclass(frozen=True, eq=False)
class PackedArray:
    """Values (num_kv_heads, num_tokens, dim) of the engine's ``dtype``, packed row by row.

    A row whose scale is zero is stored unpacked, in ``exact``. For all other rows, ``exact`` has no
    meaning, and its memory was never written.
    """

    rows: RowFormat
    dtype_name: DType
    codes: np.ndarray  # uint8 (num_kv_heads, num_tokens, packed_nbytes)
    scales: np.ndarray  # (num_kv_heads, num_tokens)
    exact: np.ndarray  # uint16 (num_kv_heads, num_tokens, dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, (num_kv_heads, num_tokens, dim)."""
        return self.exact.shape

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype of the unpacked values."""
        return NUMPY_DTYPES[self.dtype_name]

    @property
    def packed_end(self) -> int:
        """The number of tokens up to the last that is packed, in any head; 0 = none is."""
        packed = np.flatnonzero(self.scales.any(axis=0))
        return int(packed[-1]) + 1 if len(packed) else 0

    def __getitem__(self, where: Slices) -> PackedArray:
        """Return a view of some heads and tokens."""
        return self._with(self.codes[where], self.scales[where], self.exact[where])

    def __setitem__(self, everywhere: Any, values: PackedArray | np.ndarray) -> None:
        """Replace all rows by ``values``; ``everywhere`` must be ``...``.

        ``values``: a packed array, or an array of the engine's dtype, which is stored unpacked, in
        16 bits per value.
        """
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
        """Set every element to ``value``; all rows are then stored unpacked."""
        self[...] = np.full(self.shape, value, self.dtype)

    def copy(self) -> PackedArray:
        """Return a copy in memory of its own."""
        copied = empty_packed(self.rows, self.dtype_name, self.shape)
        copied[...] = self
        return copied

    def view(self, dtype: Any) -> np.ndarray:
        """Return the unpacked values under another dtype."""
        return self.__array__().view(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Unpack with numpy, for inspection."""
        values = np.array(floats.from_stored(self.exact, self.dtype_name))
        packed = self.scales != 0
        if packed.any():
            rows = self.rows.unpack(self.codes[packed], self.scales[packed], self.shape[2])
            values[packed] = floats.narrow(rows, self.dtype_name)
        return values if dtype is None else values.astype(dtype)

    def _with(self, codes: np.ndarray, scales: np.ndarray, exact: np.ndarray) -> PackedArray:
        return PackedArray(self.rows, self.dtype_name, codes, scales, exact)


def empty_packed(rows: RowFormat, dtype: DType, shape: tuple[int, ...]) -> PackedArray:
    """Make an uninitialised array, all of whose rows count as unpacked.

    ``shape`` is (num_kv_heads, num_tokens, dim).
    """
    heads, num_tokens, dim = shape
    return PackedArray(
        rows,
        dtype,
        np.empty((heads, num_tokens, rows.packed_nbytes(dim)), np.uint8),
        np.zeros((heads, num_tokens), rows.scale_dtype),
        np.empty(shape, np.uint16),
    )


class PackedLayout(KVLayout, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layout of a packed cache: its runs consist of ``PackedArray``."""

    num_bits: int

    @property
    def rows(self) -> RotatedRows:
        """The format of its rows."""
        from kvstore.codecs.rows.rotated_rows import RotatedRows

        return RotatedRows(self.num_bits)

    @property
    def bytes_per_token(self) -> int:
        """The hot bytes of a packed token; nearly all tokens are packed."""
        rows, scale = self.rows, self.rows.scale_dtype.itemsize
        sides = ((x.num_kv_heads, dim) for x in self.layers for dim in (x.head_dim, x.value_dim))
        return sum(heads * (rows.packed_nbytes(dim) + scale) for heads, dim in sides)

    def empty(self, num_tokens: int) -> list[KVPair]:
        """Return fresh ``PackedArray``s for ``num_tokens`` tokens of every layer."""
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
