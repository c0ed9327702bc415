"""K or V of one layer of one session, packed but for its first and its newest tokens.

    first tokens | packed tokens | newest tokens
    as they are  | codes, scales | as they are

Every change makes a new object out of new arrays, so copies may share everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from engines.mlx_worker.live_rows import LiveRows, RowKind, Shared
from kvstore.codecs.payload import NUM_SINKS


@dataclass(frozen=True)
class LiveSide(Shared):
    """Arrays of one session, (1, num_kv_heads, tokens, ...). "Stored": bf16, or fp16 in an fp16
    engine, which is the precision that rows are packed from."""

    sinks: mx.array  # stored dtype (1, heads, up to 4, dim)
    codes: mx.array  # uint8 (1, heads, num_packed, bytes of a row)
    scales: mx.array  # uint16 (1, heads, num_packed)
    recent: mx.array  # stored dtype (1, heads, num_recent, dim)

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        return self.sinks, self.codes, self.scales, self.recent

    @property
    def num_packed(self) -> int:
        return int(self.scales.shape[2])

    @property
    def num_tokens(self) -> int:
        return int(self.sinks.shape[2]) + self.num_packed + int(self.recent.shape[2])

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in self.arrays))

    def appended(self, rows: mx.array) -> LiveSide:
        """``rows``: (1, heads, any number, dim) in any dtype."""
        rows = rows.astype(self.recent.dtype)
        missing = min(NUM_SINKS - self.sinks.shape[2], rows.shape[2])
        sinks, recent = self.sinks, self.recent
        if missing > 0:  # nothing is behind the first tokens yet
            sinks = mx.concatenate([sinks, rows[:, :, :missing]], axis=2)
            rows = rows[:, :, missing:]
        if rows.shape[2]:
            recent = mx.concatenate([recent, rows], axis=2)
        return LiveSide(sinks, self.codes, self.scales, recent)

    def packed(self, rows: LiveRows, count: int) -> tuple[LiveSide, mx.array]:
        """With the oldest ``count`` of the newest tokens packed, and whether one of them cannot be:
        its scale is zero, but it is not."""
        old = self.recent[:, :, :count]
        codes, scales = rows.pack(old)
        lost = mx.any((scales == 0) & (mx.abs(old).max(axis=-1) != 0))
        side = LiveSide(
            self.sinks,
            mx.concatenate([self.codes, codes], axis=2),
            mx.concatenate([self.scales, scales], axis=2),
            mx.contiguous(self.recent[:, :, count:]),
        )
        return side, lost

    def trimmed(self, num_tokens: int) -> LiveSide:
        """The first ``num_tokens`` tokens."""
        sinks = min(num_tokens, self.sinks.shape[2])
        packed = min(num_tokens - sinks, self.num_packed)
        recent = num_tokens - sinks - packed
        return LiveSide(
            self.sinks[:, :, :sinks],
            self.codes[:, :, :packed],
            self.scales[:, :, :packed],
            self.recent[:, :, :recent],
        )


def empty_side(kind: RowKind, num_heads: int) -> LiveSide:
    none = mx.zeros((1, num_heads, 0, kind.dim), kind.dtype)
    row_nbytes = kind.format.packed_nbytes(kind.dim)
    codes = mx.zeros((1, num_heads, 0, row_nbytes), mx.uint8)
    return LiveSide(none, codes, mx.zeros((1, num_heads, 0), mx.uint16), none)
