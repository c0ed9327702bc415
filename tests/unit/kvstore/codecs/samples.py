"""Rows as real caches have them: channels of very different size.

Equal channels hide the gain of a rotation, so nothing here is plain Gaussian.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvstore.codecs.floats import narrow, to_stored, widen
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.shapes import DType, KVLayer, KVLayout, KVPair


def uneven(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """fp32 values whose channels (last axis) differ by a lognormal factor."""
    rng = np.random.default_rng(seed)
    channels = rng.lognormal(0, 1, shape[-1])
    values: np.ndarray = (rng.standard_normal(shape) * channels).astype(np.float32)
    return values


def run_of(layout: KVLayout, num_tokens: int, seed: int = 0) -> list[KVPair]:
    """fp32 layouts get values that bf16 cannot hold."""
    run = layout.empty(num_tokens)
    for number, array in enumerate(array for pair in run for array in pair):
        values = uneven(array.shape, seed + number)
        array[:] = values if layout.dtype == "float32" else narrow(values, layout.dtype)
    return run


def layout_of(
    dim: int, dtype: DType = "bfloat16", num_layers: int = 1, num_heads: int = 2
) -> KVLayout:
    return KVLayout(dtype, (KVLayer(num_heads, dim, dim),) * num_layers)


def shape_of(width: int, num_heads: int = 2) -> StackShape:
    """The stack of one layer's heads, K and V alike."""
    (shape,) = stack_shapes(Scope("head"), layout_of(width, num_heads=num_heads))
    return shape


def values_of(array: np.ndarray, dtype: DType) -> np.ndarray:
    """fp32, for any dtype of the engine."""
    return array if dtype == "float32" else widen(to_stored(array, dtype), dtype)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over rows."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(np.mean((a * b).sum(-1) / lengths))


def frozen_rows(num_rows: int, dim: int) -> np.ndarray:
    """bf16 bit patterns from a hash, the same for ever: exponents grow along the channels."""
    name = f"frozen rows {num_rows} {dim}".encode()
    raw = np.frombuffer(hashlib.shake_256(name).digest(2 * num_rows * dim), "<u2")
    exponents = (120 + np.arange(dim) % 11).astype(np.uint16)
    return (raw.reshape(num_rows, dim) & 0x807F) | exponents << 7
