"""Puts the packed sessions of a batch together for attention."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engines.mlx_worker.host_rows import HostRows
from engines.mlx_worker.live_rows import LiveRows
from engines.mlx_worker.live_side import LiveSide


def fetch(
    rows: LiveRows,
    sides: Sequence[LiveSide | None],
    starts: Sequence[int],
    width: int,
    dtype: mx.Dtype,
) -> mx.array:
    """(sessions, num_kv_heads, width, dim) of ``dtype``; None = a session without a token yet.

    Session ``i`` begins at column ``starts[i]``; all other columns are zero.
    """
    if isinstance(rows, HostRows):
        return rows.fetch(sides, starts, width, dtype)
    unpacked = iter(_unpack_all(rows, [side for side in sides if side is not None]))
    held = [side for side in sides if side is not None]
    num_heads = held[0].recent.shape[1]
    batch = []
    for side, start in zip(sides, starts, strict=True):
        before = mx.zeros((1, num_heads, start, rows.kind.dim), rows.kind.dtype)
        parts = [before]
        if side is not None:
            parts += [side.sinks, next(unpacked), side.recent]
        after = width - sum(part.shape[2] for part in parts)
        parts.append(mx.zeros((1, num_heads, after, rows.kind.dim), rows.kind.dtype))
        filled = [part for part in parts if part.shape[2]]
        batch.append(filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=2))
    whole = batch[0] if len(batch) == 1 else mx.concatenate(batch, axis=0)
    return whole.astype(dtype)


def _unpack_all(rows: LiveRows, sides: Sequence[LiveSide]) -> list[mx.array]:
    """The packed tokens of every session, in one go: (1, num_kv_heads, num_packed, dim) each."""
    heads, row_nbytes = sides[0].codes.shape[1], sides[0].codes.shape[3]
    counts = [heads * side.num_packed for side in sides]
    if not sum(counts):
        return [side.sinks[:, :, :0] for side in sides]
    codes = mx.concatenate([side.codes.reshape(-1, row_nbytes) for side in sides])
    scales = mx.concatenate([side.scales.reshape(-1) for side in sides])
    unpacked = rows.unpack(codes, scales)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    pieces = zip(sides, counts, ends, strict=True)
    return [
        unpacked[end - count : end].reshape(1, heads, side.num_packed, rows.kind.dim)
        for side, count, end in pieces
    ]
