"""What a model says behind its cache, and how that depends on what is in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engines.mlx_worker.cache.kv_arrays import copy_of
from engines.mlx_worker.cache.layout import Caches, is_growing, leaves, packable_window

DRAW: Final = 1  # seed of the tokens that gradients are taken for


def log_probs(model: Any, caches: Caches, tokens: Sequence[int]) -> mx.array:
    """Feed ``tokens`` behind ``caches``; the log-probabilities after each, fp32 (tokens, vocab)."""
    logits = model(mx.array(list(tokens))[None], cache=caches)[0].astype(mx.float32)
    scores: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return scores


def gradients(
    model: Any,
    known: list[tuple[mx.array, mx.array]],
    tokens: Sequence[int],
    told: Sequence[Sequence[mx.array]] = (),
) -> list[list[mx.array]]:
    """Gradients by ``known`` of the loss after ``tokens``, which follow it; not evaluated yet.

    The loss is that of tokens which the model itself draws. Nothing here is evaluated.

    Args:
        known: K and V of each layer, (1, num_kv_heads, num_known, dim).
        told: gradients of later losses by K and V of ``known`` and ``tokens``, if there are any.

    Returns:
        fp32, in the shapes of ``known``.
    """
    first = known[0][0].shape[2]
    last = first + len(tokens)

    def loss(arrays: list[tuple[mx.array, mx.array]]) -> mx.array:
        caches = make_prompt_cache(model)
        for cache, (keys, values) in zip(caches, arrays, strict=True):
            cache.state = (keys, values, first)
        scores = log_probs(model, caches, tokens)
        drawn = mx.random.categorical(mx.stop_gradient(scores), key=mx.random.key(DRAW))
        total = -mx.take_along_axis(scores, drawn[:, None], axis=-1).sum()
        for cache, pair in zip(caches, told, strict=False):
            for array, later in zip((cache.keys, cache.values), pair, strict=True):
                own = array[..., first:last, :].astype(mx.float32)
                total = total + (own * later[..., first:last, :]).sum()
        return total

    found = mx.grad(loss)(known)
    return [[x.astype(mx.float32) for x in pair] for pair in found]


def session_gradients(
    model: Any, held: Caches, tokens: Sequence[int]
) -> tuple[list[list[mx.array]], list[list[mx.array]]]:
    """Gradients of the loss after ``tokens`` by rows in the caches before them; not evaluated yet.

    The loss is that of ``gradients``. By rows of every token and by those of windows, K and V of
    each layer, fp32 (1, num_kv_heads, num_tokens, dim); what else is held counts as given. Windows
    are in temporal order, without spare room.
    """
    places = [i for i, x in enumerate(leaves(held)) if is_growing(x) or packable_window(x)]
    kept = list(leaves(held))
    known = [tuple(kept[i].state[:2]) for i in places]

    def loss(arrays: list[tuple[mx.array, mx.array]]) -> mx.array:
        caches = copy_of(held)
        own = list(leaves(caches))
        for place, pair in zip(places, arrays, strict=True):
            own[place].state = (*pair, *own[place].state[2:])
        scores = log_probs(model, caches, tokens)
        drawn = mx.random.categorical(mx.stop_gradient(scores), key=mx.random.key(DRAW))
        return -mx.take_along_axis(scores, drawn[:, None], axis=-1).sum()

    found = [[x.astype(mx.float32) for x in pair] for pair in mx.grad(loss)(known)]
    growing = [x for place, x in zip(places, found, strict=True) if is_growing(kept[place])]
    windows = [x for place, x in zip(places, found, strict=True) if not is_growing(kept[place])]
    return growing, windows
