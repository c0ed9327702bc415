"""How a model turns its keys, found by turning something and looking.

mlx_lm has half a dozen rotary classes (plain, Llama 3, Yarn, proportional, ...), each with its own
names for its numbers. What they do is the same: a matrix for each position, which turns pairs of
channels. So the identity is turned once, the pairs and angles are read off, and what was read is
tried at other positions before it is believed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kvstore.codecs.pieces.rope import Rope

TRIED_AT = (0, 7, 1000)
TOLERANCE = 2e-3  # at the farthest of these positions, angles are no better than that in fp32


def ropes_of(model: Any, head_dims: list[int]) -> tuple[Rope | None, ...]:
    """One for each layer of the cache, whose keys have ``head_dims`` channels.

    Raises:
        ValueError: a layer turns its keys in a way that is not understood.
    """
    layers = list(model.layers)
    if len(layers) != len(head_dims):
        raise ValueError("the model's layers are not those of its cache")
    return tuple(_rope_of(x, dim) for x, dim in zip(layers, head_dims, strict=True))


def _rope_of(layer: Any, head_dim: int) -> Rope | None:
    attention = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
    module = getattr(attention, "rope", None)
    if attention is None or module is None:
        raise ValueError("how this model turns its keys is not to be found")
    rope = _read(_turned(module, head_dim, 1))
    for position in TRIED_AT:
        found, expected = _turned(module, head_dim, position), _matrix(rope, head_dim, position)
        if not np.allclose(found, expected, atol=TOLERANCE):
            raise ValueError("this model turns its keys in a way that is not understood")
    return rope


def _turned(module: Any, dim: int, position: int) -> np.ndarray:
    """Row ``i``: what becomes of channel ``i`` at ``position``; fp32 (dim, dim)."""
    identity = mx.eye(dim)[:, None, None, :]
    return np.array(module(identity, offset=position).astype(mx.float32)).reshape(dim, dim)


def _read(turned: np.ndarray) -> Rope | None:
    """Of the matrix at position one."""
    dim = len(turned)
    angles = {}
    for i in range(dim):
        partner = int(np.abs(np.where(np.arange(dim) == i, 0, turned[i])).argmax())
        if partner > i and abs(turned[i, partner]) > 0:
            angles[i] = (partner, float(np.arctan2(turned[i, partner], turned[i, i])))
    if not angles:
        return None
    interleaved = all(partner == i + 1 for i, (partner, _) in angles.items()) and dim > 2
    step = 1 if interleaved else max(partner - i for i, (partner, _) in angles.items())
    pairs = max(i for i in angles) // 2 + 1 if interleaved else step
    firsts = range(0, 2 * pairs, 2) if interleaved else range(pairs)
    return Rope(tuple(angles.get(i, (i, 0.0))[1] for i in firsts), interleaved)


def _matrix(rope: Rope | None, dim: int, position: int) -> np.ndarray:
    matrix = np.eye(dim, dtype=np.float64)
    if rope is None:
        return matrix
    half = len(rope.frequencies)
    for i, frequency in enumerate(rope.frequencies):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        cos, sin = np.cos(frequency * position), np.sin(frequency * position)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cos, sin, -sin, cos
    return matrix
