"""Holds K or V of one layer of one session in packed rows, and defines the packers' interface.

A ``RowPacker`` is the cold store's row codec on the device: it writes and reads exactly the bytes
of ``kvstore.codecs.rows.rotated_rows``, so a live cache and a cold session hold the same rows. A
``PackedSide`` packs all tokens except its first and its newest:

    first tokens | packed tokens | newest tokens
    as they are  | codes, scales | as they are

A row that cannot be packed (infinite, or out of a scale's range) has a scale of zero and is also
kept unpacked; a row of zeros has a scale of zero, too. Every change makes a new object with new
arrays, so copies may share their arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeAlias

import mlx.core as mx
import numpy as np

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.shapes import DType


@dataclass(frozen=True)
class RowKind:
    """The format of the rows of one side (K or V) of a model's layers."""

    num_bits: int
    dim: int
    stored: DType  # dtype of a row before it is packed: bfloat16, or float16 in an fp16 engine

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
        """Pack rows, (..., dim) of the stored dtype.

        Returns:
            codes, uint8 (..., num_bits * dim / 8), and scales, fp16 bit patterns as uint16 (...).
            A scale of zero means that the row cannot be packed, or is all zeros.
        """

    def unpack(self, codes: mx.array, scales: mx.array) -> mx.array:
        """Return rows, (..., dim) of the stored dtype; rows whose scale is zero become zeros."""


class NeverCopied:
    """Makes ``deepcopy`` return the object itself; mlx_lm deep-copies caches to split a batch.

    For classes whose objects never change.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True)
class PackedSide(NeverCopied):
    """K or V of one session in one layer; "stored dtype" is ``RowKind.stored``."""

    sinks: mx.array  # stored dtype (1, heads, up to 4, dim)
    codes: mx.array  # uint8 (1, heads, num_packed, bytes of a row)
    scales: mx.array  # uint16 (1, heads, num_packed)
    recent: mx.array  # stored dtype (1, heads, num_recent, dim)
    kept: mx.array  # stored dtype (1, num_kept, dim): rows that cannot be packed
    places: mx.array  # int32 (1, num_kept, 2): head and packed token of each kept row

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.sinks, self.codes, self.scales, self.recent, self.kept, self.places

    @property
    def num_packed(self) -> int:
        """The number of packed tokens."""
        return int(self.scales.shape[2])

    @property
    def num_kept(self) -> int:
        """The number of rows that cannot be packed."""
        return int(self.kept.shape[1])

    @property
    def num_tokens(self) -> int:
        return int(self.sinks.shape[2]) + self.num_packed + int(self.recent.shape[2])

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in self.arrays))

    def appended(self, rows: mx.array) -> PackedSide:
        """Return a side with tokens added; ``rows``: (1, num_kv_heads, any number, dim), floats."""
        rows = rows.astype(self.recent.dtype)
        missing = min(NUM_SINKS - self.sinks.shape[2], rows.shape[2])
        sinks, recent = self.sinks, self.recent
        if missing > 0:  # nothing follows the first tokens yet
            sinks = mx.concatenate([sinks, rows[:, :, :missing]], axis=2)
            rows = rows[:, :, missing:]
        if rows.shape[2]:
            recent = mx.concatenate([recent, rows], axis=2)
        return replace(self, sinks=sinks, recent=recent)

    def packed(self, packer: RowPacker, count: int) -> tuple[PackedSide, mx.array]:
        """Pack the oldest ``count`` of the newest tokens.

        Returns:
            The new side, and bool (1, heads, count) that marks the rows that cannot be packed: the
            scale is zero but the row is not. Pass these rows to ``keeping``.
        """
        old = self.recent[:, :, :count]
        codes, scales = packer.pack(old)
        side = replace(
            self,
            codes=mx.concatenate([self.codes, codes], axis=2),
            scales=mx.concatenate([self.scales, scales], axis=2),
            recent=mx.contiguous(self.recent[:, :, count:]),
        )
        return side, (scales == 0) & (mx.abs(old).max(axis=-1) != 0)

    def keeping(self, rows: mx.array, marked: mx.array) -> PackedSide:
        """Return a side that also keeps the marked rows of those packed last, unpacked.

        ``marked``: bool (1, heads, count). ``rows``: (1, heads, count or more, dim).
        """
        heads, tokens = (mx.array(x.astype(np.int32)) for x in np.nonzero(np.array(marked[0])))
        places = mx.stack([heads, tokens + (self.num_packed - marked.shape[2])], axis=1)
        return replace(
            self,
            kept=mx.concatenate([self.kept, rows[:, heads, tokens]], axis=1),
            places=mx.concatenate([self.places, places[None]], axis=1),
        )

    def filled(self, rows: mx.array) -> mx.array:
        """Write the kept rows into the unpacked ones, (1, heads, num_packed, dim); return these."""
        if self.num_kept:
            heads, tokens = self.places[0].T
            rows[:, heads, tokens] = self.kept
        return rows

    def trimmed(self, num_tokens: int) -> PackedSide:
        """Return a side with only the first ``num_tokens`` tokens."""
        if num_tokens == self.num_tokens:
            return self
        sinks = min(num_tokens, self.sinks.shape[2])
        packed = min(num_tokens - sinks, self.num_packed)
        recent = num_tokens - sinks - packed
        kept, places = self.kept, self.places
        if self.num_kept:
            inside = np.flatnonzero(np.array(places[0, :, 1]) < packed)
            kept, places = (x[:, mx.array(inside.astype(np.int32))] for x in (kept, places))
        return PackedSide(
            self.sinks[:, :, :sinks],
            self.codes[:, :, :packed],
            self.scales[:, :, :packed],
            self.recent[:, :, :recent],
            kept,
            places,
        )


KVSides: TypeAlias = tuple[PackedSide, PackedSide]  # K and V


def empty_side(kind: RowKind, num_heads: int) -> PackedSide:
    """Return a side without tokens."""
    none = mx.zeros((1, num_heads, 0, kind.dim), kind.dtype)
    row_nbytes = kind.format.packed_nbytes(kind.dim)
    codes = mx.zeros((1, num_heads, 0, row_nbytes), mx.uint8)
    scales = mx.zeros((1, num_heads, 0), mx.uint16)
    kept, places = mx.zeros((1, 0, kind.dim), kind.dtype), mx.zeros((1, 0, 2), mx.int32)
    return PackedSide(none, codes, scales, none, kept, places)
