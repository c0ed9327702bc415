"""Does a run of arrays look the way its layout says?"""

from __future__ import annotations

import numpy as np

from kvstore.shapes import KVLayout, KVRun


def check_run(run: KVRun, layout: KVLayout) -> int:
    """Number of tokens in ``run``.

    Raises:
        ValueError: a defect in the caller: shapes, dtype or strides are not the layout's.
    """
    if len(run) != len(layout.layers):
        raise ValueError(f"{len(run)} layers where the layout has {len(layout.layers)}")
    num_tokens = run[0][0].shape[1] if run else 0
    dtype = layout.numpy_dtype
    for (key, value), layer in zip(run, layout.layers, strict=True):
        _check(key, (layer.num_kv_heads, num_tokens, layer.head_dim), dtype)
        _check(value, (layer.num_kv_heads, num_tokens, layer.value_dim), dtype)
    return num_tokens


def _check(array: np.ndarray, shape: tuple[int, int, int], dtype: np.dtype) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{array.dtype} {array.shape} where the layout has {dtype} {shape}")
    if array.strides[2] != dtype.itemsize and array.size:
        raise ValueError("the values of a row have to lie side by side in memory")
