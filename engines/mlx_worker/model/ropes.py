"""Reads off how the layers of a model turn their keys. Belongs to the thread that loaded it."""

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
    """One function for each layer that reads off how it turns its keys; None if it turns none.

    ``windows``: of the layers with sliding windows, not of those that grow. Of a model with states
    a layer whose turning is not to be found counts as one without: that costs bits, not truth.

    The functions raise ``ValueError`` if a layer turns its keys in a way that is not understood.
    """
    kept = plan.states.windows if windows and plan.states else None if windows else plan.layout
    if kept is None:
        return []
    layers = _layers_of(model, plan, windows)
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


def _layers_of(model: Any, plan: CachePlan, windows: bool) -> list[Any]:
    """The model's layers whose caches grow, or are windows; of layers with several caches each."""
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
    """True if a latent lies where others keep keys, and its turned part in the place of values."""
    attention = _attention_of(layer)
    found = [getattr(attention, x, 0) for x in ("kv_lora_rank", "qk_rope_head_dim")]
    return kept.num_kv_heads == 1 and found == [kept.head_dim, kept.value_dim]


def _attention_of(layer: Any) -> Any:
    return getattr(layer, "self_attn", None) or getattr(layer, "attention", None)


def _rope_of_latent(layer: Any, dim: int) -> Rope | None:
    """Read how a layer rotates the ``dim`` channels beside its latents; None if not found."""
    rope = _rope_if_found(layer, dim)
    return None if rope is None else msgspec.structs.replace(rope, side="values")


def _rope_if_found(layer: Any, head_dim: int) -> Rope | None:
    try:
        return rope_of(layer, head_dim)
    except ValueError:
        return None


def rope_of(layer: Any, head_dim: int) -> Rope | None:
    """Read off how one layer turns its keys. Raises ``ValueError`` where it is not found."""
    attention = _attention_of(layer)
    module = getattr(attention, "rope", None)
    if attention is None or module is None:
        raise ValueError("how this model turns its keys is not to be found")
    # Keys that are unfolded out of latents have their turned channels after the others.
    turned = min(getattr(attention, "qk_rope_head_dim", head_dim), head_dim)

    def matrix(position: int) -> np.ndarray:
        whole = np.eye(head_dim, dtype=np.float32)
        whole[-turned:, -turned:] = _turned(module, turned, position)
        return whole

    return read_rope(matrix)


def _turned(module: Any, dim: int, position: int) -> np.ndarray:
    """The (dim, dim) matrix, float32, by which keys at ``position`` are turned."""
    identity = mx.eye(dim)[:, None, None, :]
    return np.array(module(identity, offset=position).astype(mx.float32)).reshape(dim, dim)
