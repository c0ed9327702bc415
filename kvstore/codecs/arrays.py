"""Checks that the shapes and dtypes of a run match its layout."""

from __future__ import annotations

import functools

from kvstore.shapes import KVLayout, KVRun

Shape = tuple[int, ...]


def check_run(run: KVRun, layout: KVLayout) -> int:
    """Returns the number of tokens in ``run``.

    Raises:
        ValueError: shapes or dtype differ from the layout's: a defect in the caller.
    """
    num_tokens: int = run[0][0].shape[1] if run else 0
    # Compare whole lists at once: a chunk that takes a millisecond may have a hundred arrays.
    shapes, expected = [(k.shape, v.shape) for k, v in run], _shapes(layout, num_tokens)
    if shapes != expected:
        raise ValueError(f"K and V of {shapes} where the layout has {expected}")
    dtypes = {array.dtype for pair in run for array in pair}
    if dtypes - {layout.numpy_dtype}:
        raise ValueError(f"dtypes {dtypes} where the layout has {layout.numpy_dtype}")
    return num_tokens


@functools.lru_cache(maxsize=64)
def _shapes(layout: KVLayout, num_tokens: int) -> list[tuple[Shape, Shape]]:
    return [
        ((x.num_kv_heads, num_tokens, x.head_dim), (x.num_kv_heads, num_tokens, x.value_dim))
        for x in layout.layers
    ]
