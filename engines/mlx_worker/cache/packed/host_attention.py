"""Computes attention of one new token straight from packed rows, with the host's kernels.

For mlx on a CPU, whose arrays are the host's memory. Rows stay packed: see
``kvstore.codecs.attention.session_rows``.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.host_packer import bits_of
from engines.mlx_worker.cache.packed.row_packer import RowKind
from engines.mlx_worker.cache.packed.side import PackedSide
from kvstore.codecs.attention.session_rows import RowShapes, SessionRows, session_attention

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
    keys, values = kinds
    given = (queries * scale).astype(mx.float32)
    bits = [[bits_of(x) for side in sides or () for x in side.arrays] for sides in sessions]
    mx.eval(given, bits)  # all at once: a call costs as much as many rows
    attention = session_attention(RowShapes(keys.format, keys.dim, values.dim, keys.stored))
    out = np.zeros((*given.shape[:2], values.dim), np.float32)
    for query, arrays, target in zip(np.asarray(given)[:, :, 0], bits, out, strict=True):
        if arrays:
            sides = [np.asarray(x)[0] for x in arrays]
            heads = len(sides[0])
            attention.attend(
                query.reshape(heads, -1, keys.dim),
                SessionRows(*sides[:4]),
                SessionRows(*sides[4:]),
                target.reshape(heads, -1, values.dim),
            )
    return mx.array(out)[:, :, None].astype(queries.dtype)
