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

NUM_TOKENS: Final = 1024  # that the caches hold while both ways are timed
NUM_ROUNDS: Final = 3
TOLERANCE: Final = 0.02  # of the logits' spread; both ways read the same rows


def attends_better(model: Any, caches: list[Any], num_kv_heads: list[int]) -> bool:
    """Say whether a model should attend to packed rows; the log says by how much it is faster.

    ``caches``: empty packed ones, one for each layer, of so many heads. They are filled with noise
    and are of no use afterwards. Call it on the owner thread.
    """
    if not all(isinstance(x, PackedKVCache) for x in caches):
        return False
    for cache, heads in zip(caches, num_kv_heads, strict=True):
        shapes = [(1, heads, NUM_TOKENS, packer.kind.dim) for packer in cache.packers]
        keys, values = (mx.random.normal(shape) for shape in shapes)
        cache.append(keys, values)
        mx.eval(cache.state)
        cache.pack_old()
    plain, plain_s = _step(model, caches)
    with attending(model):
        packed, packed_s = _step(model, caches)
        is_right = bool(
            mx.all(mx.abs(plain - packed) <= TOLERANCE * (plain.max() - plain.min())).item()
        )
        packed_s = min([packed_s, *(_step(model, caches)[1] for _ in range(NUM_ROUNDS))])
    plain_s = min([plain_s, *(_step(model, caches)[1] for _ in range(NUM_ROUNDS))])
    if not is_right:
        logger.warning("this model says something else when it attends to packed rows: it restores")
        return False
    chosen = "attends to packed rows" if packed_s < plain_s else "restores packed rows"
    logger.info(
        "live KV: this model %s; at %d tokens a step takes %.2f of the time of restoring",
        chosen,
        NUM_TOKENS,
        packed_s / plain_s,
    )
    return packed_s < plain_s


def _step(model: Any, caches: list[Any]) -> tuple[mx.array, float]:
    """Return the logits of one more token, and the seconds; the caches stay as they are."""
    begin = time.perf_counter()
    logits = model(mx.array([[1]]), cache=[copy(cache) for cache in caches])[0, -1]
    logits = logits.astype(mx.float32)
    mx.eval(logits)
    return logits, time.perf_counter() - begin
