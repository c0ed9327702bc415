"""The layout of a live cache that an engine keeps packed.

The arithmetic of its rows is imported only to count bytes or make arrays: the gateway's process
only asks whether a layout is of this kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvstore.shapes import KVLayout, KVPair

if TYPE_CHECKING:
    from kvstore.codecs.rows.rotated_rows import RotatedRows


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
        """Returns fresh ``PackedArray``s for ``num_tokens`` tokens of every layer."""
        from kvstore.codecs.rows.packed_array import empty_packed

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
