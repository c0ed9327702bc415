"""Finds the rotary position embeddings (RoPE) of a model's layers, on the model's own thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engines.calibration.rope_probe import read_rope
from engines.mlx_worker.cache.layout import CachePlan, is_growing, leaves, packable_window
from kvstore.shapes import KVLayer, Rope


def rope_readers(model: Any, plan: CachePlan, *, windows: bool) -> list[Callable[[], Rope | None]]:
    """Return for each layer a function that returns its RoPE, or None if it rotates no keys.

    If a model has states, a layer whose RoPE is not found counts as one without; that costs
    packing density, not correctness. Otherwise the functions raise ``ValueError`` for such a layer.

    Args:
        windows: True for the layers with sliding windows, False for the growing ones.
    """
    kept = plan.states.windows if windows and plan.states else None if windows else plan.layout
    if kept is None:
        return []
    layers = _layers_of(model, windows)
    if len(layers) != len(kept.layers):
        if plan.needs_state:
            return [_not_turned for _ in kept.layers]
        raise ValueError("the model's layers are not those of its cache")
    read = _rope_if_found if plan.needs_state else rope_of
    return [
        partial(_rope_of_latent, x, y.value_dim)
        if _keeps_latent(x, y)
        else partial(read, x, y.head_dim)
        for x, y in zip(layers, kept.layers, strict=True)
    ]


def _layers_of(model: Any, windows: bool) -> list[Any]:
    """Return the layer of each growing cache, or of each window; [] if layers are not known."""
    layers, caches = list(model.layers), list(make_prompt_cache(model))
    if len(layers) != len(caches):
        return []
    wanted = packable_window if windows else is_growing
    return [
        x for x, cache in zip(layers, caches, strict=True) for y in leaves([cache]) if wanted(y)
    ]


def _not_turned() -> None:
    return None


def _keeps_latent(layer: Any, kept: KVLayer) -> bool:
    """Return whether a layer (MLA) keeps a latent as keys, and the rotated channels as values."""
    attention = _attention_of(layer)
    found = [getattr(attention, x, 0) for x in ("kv_lora_rank", "qk_rope_head_dim")]
    return kept.num_kv_heads == 1 and found == [kept.head_dim, kept.value_dim]


def _attention_of(layer: Any) -> Any:
    return getattr(layer, "self_attn", None) or getattr(layer, "attention", None)


def _rope_of_latent(layer: Any, dim: int) -> Rope | None:
    """Return the RoPE of the ``dim`` channels beside a layer's latents; None if not found."""
    rope = _rope_if_found(layer, dim)
    return None if rope is None else msgspec.structs.replace(rope, side="values")


def _rope_if_found(layer: Any, head_dim: int) -> Rope | None:
    try:
        return rope_of(layer, head_dim)
    except ValueError:
        return None


def rope_of(layer: Any, head_dim: int) -> Rope | None:
    """Return the RoPE of a layer; None if it has no effect. Raises ``ValueError`` if not found."""
    attention = _attention_of(layer)
    module = getattr(attention, "rope", None)
    if attention is None or module is None:
        raise ValueError("the position encoding of this model's keys is not found")
    # Keys that are expanded from latents have their rotated channels after the others.
    turned = min(getattr(attention, "qk_rope_head_dim", head_dim), head_dim)

    def matrix(position: int) -> np.ndarray:
        whole = np.eye(head_dim, dtype=np.float32)
        whole[-turned:, -turned:] = _turned(module, turned, position)
        return whole

    return read_rope(matrix)


def _turned(module: Any, dim: int, position: int) -> np.ndarray:
    """Return the (dim, dim) matrix, float32, that rotates keys at ``position``."""
    identity = mx.eye(dim)[:, None, None, :]
    return np.array(module(identity, offset=position).astype(mx.float32)).reshape(dim, dim)
