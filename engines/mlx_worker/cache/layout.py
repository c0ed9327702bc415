"""Finds the layout of a model's caches, by inspecting real ones after a tiny forward pass.

Three kinds of cache can be kept cold. ``KVCache`` grows with every token and goes through the
codec, chunk by chunk; ``PackedKVCache`` takes its place where live KV is kept packed.
``RotatingKVCache`` (a sliding window) and ``ArraysCache`` (recurrent state) cannot be cut back to
an earlier token; they are kept as states, packed if the model's quality was measured so.
``CacheList`` is a list of these. Any other class can be served but not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from engines.kv_budget import GROWING, KVCost, cannot_batch, cannot_keep
from engines.mlx_worker.cache.packed.kv_cache import PackedKVCache
from engines.wire import BF16_BYTES, KVSize
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.shapes import KVLayer, KVLayout, StateLayout

# One mlx_lm cache object per layer of the model, all of one sequence.
Caches: TypeAlias = list[Any]

_PROBE = [1, 2, 3]
LEAST_MATRIX_ROWS = 8  # more than the kernel width of any convolution
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class CannotKeep(Exception):
    """This model's caches cannot be kept cold; the message is one sentence for the operator."""


class CannotServe(Exception):
    """mlx_lm cannot batch this model's caches at all."""


@dataclass(frozen=True)
class CachePlan:
    """The caches of one model, leaf by leaf; a layer is one leaf, or several in a CacheList."""

    class_names: tuple[str, ...]
    cost: KVCost
    layout: KVLayout | None  # layout of the growing leaves; None = the caches cannot be kept
    reason: str = ""  # why they cannot be kept, in one sentence
    states: StateLayout | None = None  # layout of the other leaves; None = there are none

    @property
    def needs_state(self) -> bool:
        """True if some leaves do not grow with every token, and must be kept as states."""
        return any(name not in GROWING for name in self.class_names)

    def kv_sizes(self) -> tuple[KVSize, KVSize | None]:
        """Return the size of an idle session's live KV, and in bf16; None if it cannot be kept."""
        live = KVSize(self.cost.per_token, self.cost.windows, self.cost.fixed)
        if (layout := self.layout) is None:
            return live, None
        per_token = layout.elements_per_token * BF16_BYTES
        if isinstance(layout, PackedLayout):
            return live, KVSize(per_token)
        wide = layout.numpy_dtype.itemsize // BF16_BYTES if layout.layers else 1
        windows = tuple((nbytes // wide, longest) for nbytes, longest in live.windows)
        return live, KVSize(per_token, windows, live.fixed)


def leaves(caches: Caches) -> Iterator[Any]:
    """Yield the caches, with those inside a CacheList in its place."""
    for cache in caches:
        if type(cache) is CacheList:
            yield from leaves(list(cache.caches))
        else:
            yield cache


def is_growing(leaf: Any) -> bool:
    """Return whether the leaf holds KV of every token, so that it can be cut anywhere."""
    return type(leaf) in (KVCache, PackedKVCache)


def probe(model: Any) -> CachePlan:
    """Return the plan of the model's caches. Call it on the owner thread.

    Raises:
        CannotServe: continuous batching is impossible with this model.
    """
    caches = make_prompt_cache(model)
    model(mx.array([_PROBE]), cache=caches)
    mx.eval([cache.state for cache in caches])
    found = list(leaves(caches))
    for leaf in found:
        if not hasattr(leaf, "merge"):
            raise CannotServe(cannot_batch(type(leaf).__name__))
    names = tuple(type(leaf).__name__ for leaf in found)
    try:
        return CachePlan(names, _cost(found), _layout(found), "", _states(found))
    except CannotKeep as error:
        return CachePlan(names, _cost(found), None, str(error))


def _layout(found: list[Any]) -> KVLayout:
    if reason := cannot_keep(type(x).__name__ for x in found):
        raise CannotKeep(reason)
    growing = [x for x in found if is_growing(x)]
    dtypes = _dtypes(growing)
    if not dtypes:
        return KVLayout(dtype="float32", layers=())
    if (layout := _layout_of(growing, dtypes)) is None:
        raise CannotKeep(f"its layers hold KV of dtype {', '.join(sorted(dtypes))}")
    return layout


def _dtypes(leaves: list[Any]) -> set[str]:
    arrays = [array for leaf in leaves for array in (leaf.keys, leaf.values)]
    return {str(array.dtype).removeprefix("mlx.core.") for array in arrays}


def _layout_of(leaves: list[Any], dtypes: set[str]) -> KVLayout | None:
    if len(dtypes) > 1 or not dtypes <= {"float32", "float16", "bfloat16"}:
        return None
    layers = [KVLayer(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in leaves]
    return KVLayout(dtype=dtypes.pop(), layers=tuple(layers))  # type: ignore[arg-type]


def is_matrix(array: mx.array) -> bool:
    """Return whether an array is a recurrent layer's matrices, not inputs of a convolution.

    A convolution keeps at most as many rows as its kernel is wide.
    """
    rows = array.size // array.shape[-1] if array.ndim and array.size else 0
    return array.ndim > 2 and rows >= LEAST_MATRIX_ROWS and array.dtype in FLOATS


def packable_window(leaf: Any) -> bool:
    """Return whether a leaf is a sliding window that keeps only the newest tokens."""
    return type(leaf) is RotatingKVCache and leaf.keep == 0


def _states(found: list[Any]) -> StateLayout | None:
    rest = [x for x in found if not is_growing(x)]
    if not rest:
        return None
    caches = [list[Any](x.cache) for x in rest if type(x) is ArraysCache]
    arrays = [array for cache in caches for array in cache if array is not None]
    windows = [x for x in rest if packable_window(x)]
    kept = _window_layout(windows, found)
    return StateLayout(
        windows=kept,
        window_tokens=int(windows[0].max_size) if kept else 0,
        has_matrices=any(is_matrix(x) for x in arrays),
    )


def _window_layout(windows: list[Any], found: list[Any]) -> KVLayout | None:
    """Return the layout of the windows; None unless all are equally long, to be packed together."""
    if not windows or len({x.max_size for x in windows}) > 1:
        return None
    return _layout_of(windows, _dtypes([x for x in found if is_growing(x)] + windows))


def _cost(found: list[Any]) -> KVCost:
    per_token, windows, fixed = 0, [], 0
    for leaf in found:
        if type(leaf) is RotatingKVCache:
            windows.append((_bytes_per_token(leaf), int(leaf.max_size)))
        elif hasattr(leaf, "keys"):
            per_token += _bytes_per_token(leaf)
        else:
            fixed += leaf.nbytes
    return KVCost(per_token, tuple(windows), fixed, len(found))


def _bytes_per_token(leaf: Any) -> int:
    return int(sum(x.nbytes // x.shape[2] for x in (leaf.keys, leaf.values)))
