"""Finds out at the start whether attending to packed rows is right on this model, and faster."""

from __future__ import annotations

import logging
import time
from copy import copy
from typing import Any, Final

import mlx.core as mx

from engines.mlx_worker.cache.packed.attention import attending
from engines.mlx_worker.cache.packed.kv_cache import PackedKVCache

logger = logging.getLogger(__name__)

PROMPT: Final = [x % 64 for x in range(256)]  # so long that half of it is packed
NEXT: Final = (1, 2, 3)  # any of these comes after it
NUM_TOKENS: Final = 1024  # that the caches hold while both ways are timed
NUM_ROUNDS: Final = 4
# Restored rows are rounded to 16 bits, attended ones are not: the usual distance is a thousandth of
# the logits' spread. A model that computes attention in a way of its own is away by half of it.
TOLERANCE: Final = 0.05


def attends_better(model: Any, caches: list[Any], num_kv_heads: list[int]) -> bool:
    """Say whether a model should attend to packed rows; the log says by how much it is faster.

    ``caches``: empty packed ones, one for each layer, of so many heads; they are of no use
    afterwards. Call it on the owner thread.
    """
    if not all(isinstance(x, PackedKVCache) for x in caches):
        return False
    if not says_the_same(model, caches):
        logger.warning("this model says something else when it attends to packed rows: it restores")
        return False
    _fill_with_noise(caches, num_kv_heads)
    restoring_s, attending_s = [], []
    for _ in range(NUM_ROUNDS):
        restoring_s.append(_step(model, caches)[1])
        with attending(model):
            attending_s.append(_step(model, caches)[1])
    share = min(attending_s) / min(restoring_s)
    logger.info(
        "live KV: this model %s; at %d tokens a step takes %.2f of the time of restoring",
        "attends to packed rows" if share < 1 else "restores packed rows",
        NUM_TOKENS,
        share,
    )
    return share < 1


def says_the_same(model: Any, caches: list[Any]) -> bool:
    """Compare logits after a prompt, of which the caches are filled, in both ways."""
    step = len(PROMPT) // 2
    for at in range(0, len(PROMPT), step):
        model(mx.array([PROMPT[at : at + step]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        for cache in caches:
            cache.pack_old()
    alike = 0
    for token in NEXT:
        restored, _ = _step(model, caches, token)
        with attending(model):
            attended, _ = _step(model, caches, token)
        spread = restored.max() - restored.min()
        alike += bool((mx.abs(attended - restored).max() <= TOLERANCE * spread).item())
    return alike > len(NEXT) // 2


def _fill_with_noise(caches: list[Any], num_kv_heads: list[int]) -> None:
    for cache, heads in zip(caches, num_kv_heads, strict=True):
        num_tokens = NUM_TOKENS - cache.offset
        shapes = [(1, heads, num_tokens, packer.kind.dim) for packer in cache.packers]
        keys, values = (mx.random.normal(shape) for shape in shapes)
        cache.append(keys, values)
        mx.eval(cache.state)
        cache.pack_old()


def _step(model: Any, caches: list[Any], token: int = 1) -> tuple[mx.array, float]:
    """Return the logits of one more token, and the seconds; the caches stay as they are."""
    begin = time.perf_counter()
    logits = model(mx.array([[token]]), cache=[copy(cache) for cache in caches])[0, -1]
    logits = logits.astype(mx.float32)
    mx.eval(logits)
    return logits, time.perf_counter() - begin
