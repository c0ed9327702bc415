"""Lets a model of mlx_lm attend to packed caches, where that is right and faster.

mlx_lm's models import ``scaled_dot_product_attention`` by name and call it with the cache, after
the cache was asked for keys and values. That function of the model's own module is replaced, for as
long as ``attending`` is entered, by one that asks a packed cache for its attention and passes
everything else on. Nothing of mlx_lm's other modules is touched. ``attends_better`` tries both ways
at the start.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import base

from engines.mlx_worker.cache.packed.kv_cache import BatchPackedKVCache, PackedKVCache
from engines.mlx_worker.cache.packed.rows import NeverCopied

logger = logging.getLogger(__name__)

NAME: Final = "scaled_dot_product_attention"
PROMPT: Final = [x % 64 for x in range(256)]  # so long that half of it is packed
NEXT: Final = (1, 2, 3)  # any of these comes after it
NUM_TOKENS: Final = 1024  # that the caches hold while both ways are timed
NUM_ROUNDS: Final = 4
# Restored rows are rounded to 16 bits, attended ones are not: the usual distance is a thousandth of
# the logits' spread. A model that computes attention in a way of its own is away by half of it.
TOLERANCE: Final = 0.05


class PackedAttention:
    """Stands in for mlx_lm's function of this name in one module."""

    def __init__(self, plain: Callable[..., mx.array]) -> None:
        self.plain = plain

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        cache = kwargs["cache"] if "cache" in kwargs else args[0] if args else None
        if isinstance(cache, PackedKVCache | BatchPackedKVCache) and cache.is_waiting:
            scale = kwargs["scale"] if "scale" in kwargs else args[1]
            sinks = kwargs["sinks"] if "sinks" in kwargs else args[3] if len(args) > 3 else None
            if sinks is None:
                return cache.attended(queries, scale)
            keys, values = cache.fetched(keys.dtype)
        return self.plain(queries, keys, values, *args, **kwargs)


class AttentionSeam(NeverCopied):
    """Knows the modules whose function may be replaced, and whether it is. Caches hold it."""

    def __init__(self, model: Any) -> None:
        self.modules = modules_of(model)

    def is_open(self) -> bool:
        """True while ``attending`` is entered for this model."""
        return bool(self.modules) and all(
            isinstance(getattr(module, NAME), PackedAttention) for module in self.modules
        )


def modules_of(model: Any) -> tuple[ModuleType, ...]:
    """Find the modules of a model's layers that have imported mlx_lm's function."""
    names = dict.fromkeys(type(layer).__module__ for _, layer in model.named_modules())
    modules = (sys.modules[name] for name in names if name in sys.modules)
    return tuple(module for module in modules if _has_seam(module))


def _has_seam(module: ModuleType) -> bool:
    function = getattr(module, NAME, None)
    return module is not base and (
        function is getattr(base, NAME) or isinstance(function, PackedAttention)
    )


@contextlib.contextmanager
def attending(model: Any) -> Iterator[None]:
    """Replace the function in the modules of a model, and put it back at the end.

    A model that does not use it is left as it is: its caches restore their rows. Entered twice, it
    is replaced once.
    """
    replaced = []
    for module in modules_of(model):
        plain = getattr(module, NAME)
        if not isinstance(plain, PackedAttention):
            setattr(module, NAME, PackedAttention(plain))
            replaced.append((module, plain))
    try:
        yield
    finally:
        for module, plain in replaced:
            setattr(module, NAME, plain)


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
