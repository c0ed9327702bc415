"""How an mlx model turns its keys: see ``engines.calibration.turning``."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from engines.calibration.turning import read_rope
from kvstore.codecs.pieces.rope import Rope


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
    return read_rope(lambda position: _turned(module, head_dim, position))


def _turned(module: Any, dim: int, position: int) -> np.ndarray:
    identity = mx.eye(dim)[:, None, None, :]
    return np.array(module(identity, offset=position).astype(mx.float32)).reshape(dim, dim)
