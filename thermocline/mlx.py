"""Packed live caches for ``mlx_lm.generate``.

    with thermocline.mlx.attending(model):
        cache = thermocline.mlx.make_cache(model, codec="tq3")
        mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)

Without ``attending`` the cache is as small, and its rows are restored at every step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from engines.config import EngineConfig
from engines.mlx_worker.cache.layout import CannotServe, probe
from engines.mlx_worker.cache.packed import attention
from engines.mlx_worker.cache.packed.model import with_packed_caches
from engines.packed_budget import HOT_CODECS


def make_cache(model: Any, codec: str = "tq3") -> list[Any]:
    """Makes a cache for each layer of a model of mlx_lm, for one prompt.

    The first four tokens and the newest 64 to 127 stay in 16 bits, all others are packed.

    Raises:
        ValueError: there is no live cache in this codec, or not for this model; says why.
    """
    if codec not in HOT_CODECS:
        raise ValueError(f"no live cache in {codec!r}; there are {', '.join(HOT_CODECS)}")
    try:
        live, _ = with_packed_caches(model, probe(model), EngineConfig(hot_codec=codec))  # type: ignore[arg-type]
    except CannotServe as error:
        raise ValueError(str(error)) from error
    caches: list[Any] = live.make_cache()
    return caches


def attending(model: Any) -> AbstractContextManager[None]:
    """Lets a model attend to packed rows as they are, until the end of the ``with``.

    Replaces ``scaled_dot_product_attention`` in the model's own module, and puts it back. Has an
    effect on CPUs only, and none on models that do not use mlx_lm's function.
    """
    return attention.attending(model)
