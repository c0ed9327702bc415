"""Converts mlx_lm's caches to numpy arrays, and back; all of it belongs to the owner thread.

Views are zero-copy and pin the engine's memory until they are dropped. They are made of a *slice*
of the cache's array, never of the array itself: mlx writes into a cache in place if there is no
other reference to its buffer, and a view of the cache's own array would see, or outlive, that
write. A slice is such a reference, so the next write goes to a new buffer.

A packed cache becomes the store's packed arrays without packing or unpacking: its rows have the
bytes of the cold store's codec already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from engines.mlx_worker.cache.layout import Caches, is_growing, is_matrix, leaves, packable_window
from engines.mlx_worker.cache.packed.host_rows import bits_of
from engines.mlx_worker.cache.packed.kv_cache import PackedKVCache
from engines.mlx_worker.cache.packed.rows import PackedSide, RowKind
from kvstore.blobs.state_tree import MatrixArray, StateArray, StateTree, WindowArray
from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.rows.packed_layout import PackedArray, PackedLayout, empty_packed
from kvstore.errors import Mismatch
from kvstore.shapes import DType, KVLayout, KVPair, KVRun

# ``compact`` frees a growing cache's spare room only above 1 / MOST_SPARE of the used part, since
# that copies the whole used part and the next turn may need the room.
MOST_SPARE = 8


def can_trim(caches: Caches) -> bool:
    """Return whether all caches, as they are now, can be cut back to any earlier token."""
    return bool(can_trim_prompt_cache(caches))


def can_always_trim(caches: Caches) -> bool:
    """Return whether ``can_trim`` holds for any number of tokens; not for windows, once full."""
    return all(map(is_growing, leaves(caches)))


def trim(caches: Caches, surplus: int) -> None:
    """Cut off the last ``surplus`` tokens; requires ``can_trim``."""
    if surplus:
        trim_prompt_cache(caches, surplus)


def copy_of(caches: Caches) -> Caches:
    """Return a copy of caches; the arrays are shared until one side writes."""
    copied: Caches = deepcopy(caches)
    return copied


def pack_old(caches: Caches) -> None:
    """Pack the tokens that have left the recent window of packed caches; leave others unchanged.

    The caches must have been evaluated.
    """
    for leaf in leaves(caches):
        if isinstance(leaf, PackedKVCache):
            leaf.pack_old()


def nbytes_of(caches: Caches) -> int:
    """Return the bytes that the caches hold in memory, spare room included."""
    return int(sum(cache.nbytes for cache in caches))


def check_length(caches: Caches, num_tokens: int) -> None:
    """Raise ``Mismatch`` if a cache that counts tokens does not hold ``num_tokens``."""
    held = {leaf.offset for leaf in leaves(caches) if hasattr(leaf, "offset")} - {num_tokens}
    if held:
        raise Mismatch(f"caches of {num_tokens} tokens hold {sorted(held)}")


def compact(caches: Caches) -> None:
    """Evaluate the caches, and free memory that they do not use.

    That is the spare room of growing caches, if it is worth a copy of the rest (``MOST_SPARE``),
    and the batch of which a finished sequence's state is still a slice.
    """
    for leaf in leaves(caches):
        if isinstance(leaf, PackedKVCache):
            leaf.pack_old()
            leaf.state = tree_map(_contiguous, leaf.state)
        elif is_growing(leaf) and leaf.keys is not None:
            keys, values, used = leaf.state
            if keys.shape[2] - used > used // MOST_SPARE:
                keys, values = (_contiguous(x[..., :used, :]) for x in (keys, values))
                leaf.state = (keys, values, used)
        else:
            leaf.state = tree_map(_contiguous, leaf.state)
    mx.eval([cache.state for cache in caches])


def sole_row(cache: Any) -> Any:
    """Return the cache of the only sequence of a batch that is not used any more.

    It avoids copies if it can; the batch's own ``extract`` copies all growing rows.
    """
    whole: Any = cache if isinstance(cache, BatchKVCache) else None
    if whole is None or whole.keys is None or any(whole.left_padding.tolist()):
        return cache.extract(0)
    row = cast(Any, KVCache)()
    row.state = (whole.keys, whole.values, whole._idx)
    return row


def _contiguous(value: Any) -> Any:
    return mx.contiguous(value) if isinstance(value, mx.array) else value


# ---- to numpy


def growing_run(caches: Caches, num_tokens: int) -> list[KVPair]:
    """Return the KV of the first ``num_tokens`` tokens of every growing layer, as views.

    K and V of each layer are (num_kv_heads, num_tokens, head_dim), in the engine's dtype, bf16 as
    uint16; for packed caches they are ``PackedArray``s.
    """
    growing = [leaf for leaf in leaves(caches) if is_growing(leaf)]
    if growing and isinstance(growing[0], PackedKVCache):  # then all of them are
        return packed_run(growing, num_tokens)
    return [
        (as_numpy(leaf.keys[0, :, :num_tokens]), as_numpy(leaf.values[0, :, :num_tokens]))
        for leaf in growing
    ]


def state_tree(caches: Caches) -> StateTree:
    """Return the exact state of every leaf that does not grow, as (class name, state).

    Rotating windows are first brought into temporal order, without spare room. Arrays that a codec
    may pack have their own types: ``WindowArray`` for windows' rows, ``MatrixArray`` for matrices
    of recurrent layers.
    """
    rest = [leaf for leaf in leaves(caches) if not is_growing(leaf)]
    return _state_of([type(leaf).merge([leaf]).extract(0) for leaf in rest])


def state_of_row(batch: Caches, row: int) -> StateTree:
    """Return the exact state of one sequence of a batch, as ``state_tree`` does."""
    rest = [leaf for leaf in leaves(batch) if type(leaf) is not BatchKVCache]
    return _state_of([leaf.extract(row) for leaf in rest])


def _state_of(in_order: Sequence[Any]) -> StateTree:
    numbers = itertools.count()
    return [(type(leaf).__name__, _marked(leaf, numbers)) for leaf in in_order]


def _marked(leaf: Any, numbers: Iterator[int]) -> StateTree:
    if not packable_window(leaf):
        marked: StateTree = tree_map(_to_numpy, leaf.state)
        return marked
    keys, values, *rest = leaf.state
    rows = [WindowArray(*_named(x), next(numbers)) for x in (keys, values)]
    return (*rows, *tree_map(_to_numpy, rest))


def _to_numpy(value: Any) -> Any:
    if not isinstance(value, mx.array):
        return value
    return (MatrixArray if is_matrix(value) else StateArray)(*_named(value))


def _named(array: mx.array) -> tuple[str, np.ndarray]:
    return str(array.dtype).removeprefix("mlx.core."), as_numpy(array[...])


def as_numpy(array: mx.array) -> np.ndarray:
    """Return a view of an array; numpy has no bf16, so that becomes bit patterns, uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


# ---- from numpy


def empty_rows(layout: KVLayout, num_tokens: int, most: int) -> tuple[list[mx.array], KVRun]:
    """Allocate mlx arrays for rows to be restored; return them and views of their first tokens.

    The arrays have room for ``most`` tokens, the views for ``num_tokens``. All arrays are
    evaluated, so any thread may call it. A packed cache gets views without arrays. The views may be
    written to until ``rebuild`` takes the arrays.
    """
    if isinstance(layout, PackedLayout):
        return [], layout.empty(num_tokens)
    count = -(-max(num_tokens, most) // KVCache.step) * KVCache.step
    arrays = [mx.array(x[None]) for pair in layout.empty(count) for x in pair]
    views = [np.asarray(x)[0, :, :num_tokens] for x in arrays]
    return arrays, list(zip(views[::2], views[1::2], strict=True))


def rebuild(
    model: Any,
    layout: KVLayout | None,
    run: KVRun,
    state: StateTree | None,
    num_tokens: int,
    arrays: Sequence[mx.array] = (),
) -> Caches:
    """Return caches that hold ``num_tokens`` tokens.

    Args:
        run: the KV of every growing layer, as ``growing_run`` returns it; copied unless it views
            ``arrays``.
        state: as ``state_tree`` returns it; None for models without state.
        arrays: those of ``empty_rows``, if ``run`` views them; they are taken over.

    Raises:
        Mismatch: the KV is not this model's, or has another length.
    """
    if layout is None:
        raise Mismatch("this model's KV is not kept")
    caches: Caches = make_prompt_cache(model)
    pairs, states = iter(run), iter(state if isinstance(state, list | tuple) else ())
    given = iter(arrays)
    for leaf in leaves(caches):
        if isinstance(leaf, PackedKVCache):
            fill_packed(leaf, next(pairs, None), num_tokens)
        elif is_growing(leaf):
            keys, values = next(pairs, (None, None))
            leaf.state = (
                _growing(keys, layout, num_tokens, next(given, None)),
                _growing(values, layout, num_tokens, next(given, None)),
                num_tokens,
            )
        else:
            _fill(leaf, next(states, None), num_tokens)
    if next(pairs, None) is not None or next(states, None) is not None:
        raise Mismatch("the stored KV has more layers than this model")
    mx.eval([cache.state for cache in caches])
    return caches


def _growing(
    array: np.ndarray | None, layout: KVLayout, num_tokens: int, given: mx.array | None
) -> mx.array:
    if array is None or array.shape[1] != num_tokens or array.dtype != layout.numpy_dtype:
        raise Mismatch("the stored KV has another shape than this model's")
    return _to_mlx(array[None] if given is None else given, layout.dtype)


def _to_mlx(array: np.ndarray | mx.array, dtype: str) -> mx.array:
    stored = mx.array(array) if isinstance(array, np.ndarray) else array
    return stored.view(mx.bfloat16) if dtype == "bfloat16" else stored


def _fill(leaf: Any, kept: Any, num_tokens: int) -> None:
    if not isinstance(kept, list | tuple) or len(kept) != 2 or kept[0] != type(leaf).__name__:
        raise Mismatch(f"the stored state is not that of a {type(leaf).__name__}")
    fixed = {name: vars(leaf)[name] for name in ("max_size", "keep") if name in vars(leaf)}
    state = tree_map(
        lambda x: _to_mlx(x.array, x.dtype) if isinstance(x, StateArray) else x, kept[1]
    )
    leaf.state = state
    if any(vars(leaf)[name] != value for name, value in fixed.items()):
        raise Mismatch(f"the stored {type(leaf).__name__} has another window than this model's")
    if getattr(leaf, "offset", num_tokens) != num_tokens:
        raise Mismatch("the stored state belongs to another position")


def packed_run(caches: Sequence[PackedKVCache], num_tokens: int) -> list[KVPair]:
    """Return copies of the first ``num_tokens`` tokens' K and V, (num_kv_heads, num_tokens, dim).

    Raises:
        Mismatch: a cache holds fewer tokens.
    """
    sides = []
    for cache in caches:
        if cache.sides is None or num_tokens > cache.offset:
            raise Mismatch(f"a cache of {cache.offset} tokens where {num_tokens} are wanted")
        sides += [side.trimmed(num_tokens) for side in cache.sides]
    bits = [[bits_of(x) for x in side.arrays] for side in sides]
    mx.eval(bits)  # in one call, which costs as much as many rows
    kinds = [(packer.kind, cache.dtype) for cache in caches for packer in cache.packers]
    arrays = [
        _array([np.asarray(x)[0] for x in held], *kind)
        for held, kind in zip(bits, kinds, strict=True)
    ]
    return [cast(KVPair, pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]


def _array(held: Sequence[np.ndarray], kind: RowKind, dtype: DType) -> PackedArray:
    """Return the ``PackedArray`` of a ``PackedSide``'s arrays, viewed, without their first axis."""
    sinks, codes, scales, recent, kept, places = held
    first = sinks.shape[1]
    last = first + scales.shape[1]
    shape = (recent.shape[0], last + recent.shape[1], kind.dim)
    array = empty_packed(kind.format, dtype, shape)
    array.exact[:, :first] = sinks
    array.exact[:, last:] = recent
    array.codes[:, first:last] = codes
    array.scales[:, first:last] = scales
    array.exact[:, first:last][scales == 0] = 0  # rows of zeros, except the kept ones
    array.exact[places[:, 0], first + places[:, 1]] = kept
    return array


def fill_packed(cache: PackedKVCache, pair: Any, num_tokens: int) -> None:
    """Fill an empty cache with the K and V that ``packed_run`` or the cold store returned.

    Raises:
        Mismatch: they are not this model's.
    """
    for array in pair or (None,):
        if not isinstance(array, PackedArray) or array.shape[1] != num_tokens:
            raise Mismatch("the stored KV has another shape than this model's")
    first = min(NUM_SINKS, num_tokens)
    end = max(first, *(array.packed_end for array in pair))
    keys, values = (
        _side(array, packer.kind, first, end)
        for array, packer in zip(pair, cache.packers, strict=True)
    )
    cache.sides, cache.offset = (keys, values), num_tokens


def _side(array: PackedArray, kind: RowKind, first: int, end: int) -> PackedSide:
    """Return a side whose packed tokens are ``first`` to ``end``; the tokens after are unpacked."""
    packed = array[:, first:end]
    odd = np.argwhere(packed.scales == 0)
    rows = packed.exact[odd[:, 0], odd[:, 1]]
    kept = rows.any(axis=1)
    return PackedSide(
        _stored(array.exact[:, :first], kind),
        mx.array(np.ascontiguousarray(packed.codes))[None],
        mx.array(np.ascontiguousarray(packed.scales))[None],
        _stored(array.exact[:, end:], kind),
        _stored(rows[kept], kind),
        mx.array(odd[kept].astype(np.int32))[None],
    )


def _stored(bits: np.ndarray, kind: RowKind) -> mx.array:
    return mx.array(np.ascontiguousarray(bits)).view(kind.dtype)[None]
