"""Turns a packed live cache into the store's packed arrays, and back, on the owner thread.

Nothing is packed or unpacked on the way: the rows have the bytes of the cold store's codec already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.host_packer import bits_of
from engines.mlx_worker.cache.packed.kv_cache import PackedKVCache
from engines.mlx_worker.cache.packed.row_packer import RowKind
from engines.mlx_worker.cache.packed.side import PackedSide
from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.floats import to_stored
from kvstore.codecs.rows.packed_array import PackedArray, empty_packed
from kvstore.errors import Mismatch
from kvstore.shapes import DType, KVPair


def packed_run(caches: Sequence[PackedKVCache], num_tokens: int) -> list[KVPair]:
    """Copy the first ``num_tokens`` tokens' K and V, (num_kv_heads, num_tokens, dim) each.

    Raises:
        Mismatch: a cache holds fewer.
    """
    sides = [side for cache in caches for side in _sides(cache, num_tokens)]
    bits = [[bits_of(x) for x in side.arrays] for side in sides]
    mx.eval(bits)  # all at once: a call costs as much as many rows
    kinds = [(packer.kind, cache.dtype) for cache in caches for packer in cache.packers]
    arrays = [
        _array([np.asarray(x)[0] for x in held], *kind)
        for held, kind in zip(bits, kinds, strict=True)
    ]
    return [cast(KVPair, pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]


def _sides(cache: PackedKVCache, num_tokens: int) -> list[PackedSide]:
    if cache.sides is None or num_tokens > cache.offset:
        raise Mismatch(f"a cache of {cache.offset} tokens where {num_tokens} are wanted")
    return [side.trimmed(num_tokens) for side in cache.sides]


def _array(held: Sequence[np.ndarray], kind: RowKind, dtype: DType) -> PackedArray:
    """Join the arrays of a ``PackedSide``, viewed, without their first axis."""
    sinks, codes, scales, recent = held
    first = sinks.shape[1]
    last = first + scales.shape[1]
    shape = (recent.shape[0], last + recent.shape[1], kind.dim)
    array = empty_packed(kind.format, dtype, shape)
    array.exact[:, :first] = sinks
    array.exact[:, last:] = recent
    array.codes[:, first:last] = codes
    array.scales[:, first:last] = scales
    # A row of zeros has no scale, and is the only such row that is ever packed here.
    array.exact[:, first:last][scales == 0] = 0
    return array


def fill_packed(cache: PackedKVCache, pair: Any, num_tokens: int) -> None:
    """Make a fresh cache hold the K and V that ``packed_run`` or the cold store gave.

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
