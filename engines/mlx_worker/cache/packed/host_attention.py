"""Computes attention of one new token straight from packed rows, with the host's kernels.

For mlx on a CPU, whose arrays are the host's memory. Rows stay packed: see
``kvstore.codecs.attention.rotated``. The first and the newest tokens are multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.host_packer import viewed
from engines.mlx_worker.cache.packed.row_packer import RowKind
from engines.mlx_worker.cache.packed.side import PackedSide
from kvstore.codecs.attention.rotated import row_attention
from kvstore.codecs.floats import widen

KVSides = tuple[PackedSide, PackedSide]


def attend(
    sessions: Sequence[KVSides | None],
    kinds: tuple[RowKind, RowKind],
    queries: mx.array,
    scale: float,
) -> mx.array:
    """Attend to each session's rows with its query; a session without tokens gives zeros.

    ``queries``: (sessions, num_heads, 1, head_dim), already turned. Returns the same with
    ``value_dim``, in the queries' dtype.
    """
    held = [sides for sides in sessions if sides is not None]
    mx.eval(queries, [side.arrays for sides in held for side in sides])
    given = np.asarray(queries.astype(mx.float32))[:, :, 0]
    out = np.zeros((*given.shape[:2], kinds[1].dim), np.float32)
    for number, sides in enumerate(sessions):
        if sides is not None:
            heads = sides[0].recent.shape[1]
            query = np.multiply(given[number], np.float32(scale)).reshape(heads, -1, kinds[0].dim)
            out[number] = _attend_one(sides, kinds, query).reshape(out.shape[1:])
    return mx.array(out)[:, :, None].astype(queries.dtype)


def _attend_one(sides: KVSides, kinds: tuple[RowKind, RowKind], query: np.ndarray) -> np.ndarray:
    """Return fp32 (num_kv_heads, queries, value_dim). ``query``: as many, of ``head_dim``."""
    keys, values = sides
    key_rows, value_rows = (row_attention(kind.format, kind.dim) for kind in kinds)
    first = int(keys.sinks.shape[2])
    last = first + keys.num_packed
    scores = np.empty((*query.shape[:2], keys.num_tokens), np.float32)
    exact = np.matmul(query, _exact(keys, kinds[0]).swapaxes(1, 2))
    scores[:, :, :first], scores[:, :, last:] = exact[:, :, :first], exact[:, :, first:]
    packed = scores[:, :, first:last]
    if last > first:
        key_rows.scores(query, viewed(keys.codes)[0], viewed(keys.scales)[0], packed)
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=2, keepdims=True)
    exact[:, :, :first], exact[:, :, first:] = scores[:, :, :first], scores[:, :, last:]
    out: np.ndarray = np.matmul(exact, _exact(values, kinds[1]))
    if last > first:
        value_rows.add_weighted(packed, viewed(values.codes)[0], viewed(values.scales)[0], out)
    out /= total
    return out


def _exact(side: PackedSide, kind: RowKind) -> np.ndarray:
    """Return the first and the newest tokens, fp32 (num_kv_heads, some, dim)."""
    bits = np.concatenate([viewed(side.sinks)[0], viewed(side.recent)[0]], axis=1)
    return widen(bits, kind.stored)
