"""Holds K or V of one layer of one session, packed but for its first and its newest tokens.

    first tokens | packed tokens | newest tokens
    as they are  | codes, scales | as they are

Every change makes a new object out of new arrays, so copies may share everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from engines.mlx_worker.cache.packed.row_packer import NeverCopied, RowKind, RowPacker
from kvstore.codecs.base import NUM_SINKS


@dataclass(frozen=True)
class PackedSide(NeverCopied):
    """Arrays of one session, (1, num_kv_heads, num_tokens, ...).

    "Stored" is the dtype that rows are packed from: bf16, or fp16 in an fp16 engine.
    """

    sinks: mx.array  # stored dtype (1, heads, up to 4, dim)
    codes: mx.array  # uint8 (1, heads, num_packed, bytes of a row)
    scales: mx.array  # uint16 (1, heads, num_packed)
    recent: mx.array  # stored dtype (1, heads, num_recent, dim)

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        return self.sinks, self.codes, self.scales, self.recent

    @property
    def num_packed(self) -> int:
        """Tokens that are packed."""
        return int(self.scales.shape[2])

    @property
    def num_tokens(self) -> int:
        return int(self.sinks.shape[2]) + self.num_packed + int(self.recent.shape[2])

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in self.arrays))

    def appended(self, rows: mx.array) -> PackedSide:
        """Add tokens: ``rows`` are (1, num_kv_heads, any number, dim) of any float dtype."""
        rows = rows.astype(self.recent.dtype)
        missing = min(NUM_SINKS - self.sinks.shape[2], rows.shape[2])
        sinks, recent = self.sinks, self.recent
        if missing > 0:  # nothing follows the first tokens yet
            sinks = mx.concatenate([sinks, rows[:, :, :missing]], axis=2)
            rows = rows[:, :, missing:]
        if rows.shape[2]:
            recent = mx.concatenate([recent, rows], axis=2)
        return PackedSide(sinks, self.codes, self.scales, recent)

    def packed(self, packer: RowPacker, count: int) -> tuple[PackedSide, mx.array]:
        """Pack the oldest ``count`` of the newest tokens.

        The second value is a boolean array, (): True if one of them cannot be packed, that is, its
        scale is zero but the row is not.
        """
        old = self.recent[:, :, :count]
        codes, scales = packer.pack(old)
        lost = mx.any((scales == 0) & (mx.abs(old).max(axis=-1) != 0))
        side = PackedSide(
            self.sinks,
            mx.concatenate([self.codes, codes], axis=2),
            mx.concatenate([self.scales, scales], axis=2),
            mx.contiguous(self.recent[:, :, count:]),
        )
        return side, lost

    def trimmed(self, num_tokens: int) -> PackedSide:
        """Keep the first ``num_tokens`` tokens only."""
        if num_tokens == self.num_tokens:
            return self
        sinks = min(num_tokens, self.sinks.shape[2])
        packed = min(num_tokens - sinks, self.num_packed)
        recent = num_tokens - sinks - packed
        return PackedSide(
            self.sinks[:, :, :sinks],
            self.codes[:, :, :packed],
            self.scales[:, :, :packed],
            self.recent[:, :, :recent],
        )


def empty_side(kind: RowKind, num_heads: int) -> PackedSide:
    """A side without a token yet."""
    none = mx.zeros((1, num_heads, 0, kind.dim), kind.dtype)
    row_nbytes = kind.format.packed_nbytes(kind.dim)
    codes = mx.zeros((1, num_heads, 0, row_nbytes), mx.uint8)
    return PackedSide(none, codes, mx.zeros((1, num_heads, 0), mx.uint16), none)
