"""Does a run of arrays look the way its layout says?"""

from __future__ import annotations

from kvstore.shapes import KVLayout, KVRun


def check_run(run: KVRun, layout: KVLayout) -> int:
    """Number of tokens in ``run``.

    Raises:
        ValueError: a defect in the caller: shapes or dtype are not the layout's.
    """
    if len(run) != len(layout.layers):
        raise ValueError(f"{len(run)} layers where the layout has {len(layout.layers)}")
    num_tokens: int = run[0][0].shape[1] if run else 0
    dtype = layout.numpy_dtype
    for (key, value), layer in zip(run, layout.layers, strict=True):
        key_shape = (layer.num_kv_heads, num_tokens, layer.head_dim)
        value_shape = (layer.num_kv_heads, num_tokens, layer.value_dim)
        if key.shape != key_shape or value.shape != value_shape:
            raise ValueError(
                f"K {key.shape}, V {value.shape} instead of {key_shape}, {value_shape}"
            )
        if key.dtype != dtype or value.dtype != dtype:
            raise ValueError(f"K {key.dtype}, V {value.dtype} instead of {dtype}")
    return num_tokens
