"""Lets a model of mlx_lm attend to packed caches: one function of its own module is replaced.

mlx_lm's models import ``scaled_dot_product_attention`` by name and call it with the cache, after
the cache was asked for keys and values. That function of the model's own module is replaced, for as
long as ``attending`` is entered, by one that asks a packed cache for its attention and passes
everything else on. Nothing of mlx_lm's other modules is touched.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import base

from engines.mlx_worker.cache.packed.kv_cache import BatchPackedKVCache, PackedKVCache
from engines.mlx_worker.cache.packed.row_packer import NeverCopied

NAME: Final = "scaled_dot_product_attention"


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
