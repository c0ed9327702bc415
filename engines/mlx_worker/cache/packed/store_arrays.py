"""Turns a packed live cache into the store's packed arrays, and back, on the owner thread.

Nothing is packed or unpacked on the way: the rows have the bytes of the cold store's codec already.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.host_packer import viewed
from engines.mlx_worker.cache.packed.kv_cache import PackedKVCache
from engines.mlx_worker.cache.packed.row_packer import RowKind
from engines.mlx_worker.cache.packed.side import PackedSide
from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.floats import to_stored
from kvstore.codecs.rows.packed_array import PackedArray, empty_packed
from kvstore.errors import Mismatch
from kvstore.shapes import DType, KVPair


def packed_pair(cache: PackedKVCache, num_tokens: int) -> KVPair:
    """Copy the first ``num_tokens`` tokens' K and V, (num_kv_heads, num_tokens, dim) each.

    Raises:
        Mismatch: the cache holds fewer.
    """
    if cache.sides is None or num_tokens > cache.offset:
        raise Mismatch(f"a cache of {cache.offset} tokens where {num_tokens} are wanted")
    sides = (side.trimmed(num_tokens) for side in cache.sides)
    pair = (
        _array(side, packer.kind, cache.dtype)
        for side, packer in zip(sides, cache.packers, strict=True)
    )
    return cast(KVPair, tuple(pair))


def _array(side: PackedSide, kind: RowKind, dtype: DType) -> PackedArray:
    heads, num_tokens = side.recent.shape[1], side.num_tokens
    array = empty_packed(kind.format, dtype, (heads, num_tokens, kind.dim))
    first = side.sinks.shape[2]
    last = first + side.num_packed
    array.exact[:, :first] = viewed(side.sinks)[0]
    array.exact[:, last:] = viewed(side.recent)[0]
    array.codes[:, first:last] = viewed(side.codes)[0]
    array.scales[:, first:last] = viewed(side.scales)[0]
    # A row of zeros has no scale, and is the only such row that is ever packed here.
    array.exact[:, first:last][array.scales[:, first:last] == 0] = 0
    return array


def fill_packed(cache: PackedKVCache, pair: Any, num_tokens: int) -> None:
    """Make a fresh cache hold the K and V that ``packed_pair`` or the cold store gave.

    Raises:
        Mismatch: they are not this model's.
    """
    if pair is None or any(not _fits(x, num_tokens) for x in pair):
        raise Mismatch("the stored KV has another shape than this model's")
    first = min(NUM_SINKS, num_tokens)
    end = first + min(_num_packed(array, first) for array in pair)
    keys, values = (
        _side(array, packer.kind, first, end)
        for array, packer in zip(pair, cache.packers, strict=True)
    )
    cache.sides, cache.offset = (keys, values), num_tokens


def _fits(array: Any, num_tokens: int) -> bool:
    return isinstance(array, PackedArray) and array.shape[1] == num_tokens


def _num_packed(array: PackedArray, first: int) -> int:
    """Count the tokens from ``first`` on that every head has packed: with a scale, or zeros."""
    odd = np.argwhere(array.scales[:, first:] == 0)
    kept = array.exact[:, first:][odd[:, 0], odd[:, 1]].any(axis=1)
    stops = odd[kept, 1]
    return int(stops.min()) if len(stops) else array.shape[1] - first


def _side(array: PackedArray, kind: RowKind, first: int, end: int) -> PackedSide:
    recent = array[:, end:]
    bits = recent.exact if recent.is_exact else to_stored(np.asarray(recent), array.dtype_name)
    side = PackedSide(
        _stored(array.exact[:, :first], kind),
        mx.array(np.ascontiguousarray(array.codes[:, first:end]))[None],
        mx.array(np.ascontiguousarray(array.scales[:, first:end]))[None],
        _stored(bits, kind),
    )
    return side


def _stored(bits: np.ndarray, kind: RowKind) -> mx.array:
    return mx.array(np.ascontiguousarray(bits)).view(kind.dtype)[None]
