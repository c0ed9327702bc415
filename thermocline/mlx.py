"""Packed live caches for ``mlx_lm.generate``.

    with thermocline.mlx.attending(model):
        cache = thermocline.mlx.make_cache(model, codec="tq3")
        mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)

Without ``attending`` the cache is as small, but its rows are restored at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engines.config import EngineConfig
from engines.kv_budget import HOT_CODECS
from engines.mlx_worker.cache import packed_model
from engines.mlx_worker.cache.layout import CannotServe, probe
from engines.mlx_worker.cache.packed_model import with_packed_caches
from kvstore.shapes import KVLayout
from thermocline.progress import reporter

if TYPE_CHECKING:
    from engines.mlx_worker.measuring.instrument import MlxInstrument
    from kvstore.codecs.learning.samples import Samples


def make_cache(model: Any, codec: str = "tq3") -> list[Any]:
    """Make a cache for each layer of a model of mlx_lm, for one prompt.

    The first four tokens and the newest 64 to 127 stay in 16 bits, all others are packed.

    Raises:
        ValueError: this codec has no live cache, or the model cannot use one; says why.
    """
    if codec not in HOT_CODECS:
        raise ValueError(f"no live cache in {codec!r}; there are {', '.join(HOT_CODECS)}")
    try:
        live, _ = with_packed_caches(model, probe(model), EngineConfig(hot_codec=codec))  # type: ignore[arg-type]
    except CannotServe as error:
        raise ValueError(str(error)) from error
    caches: list[Any] = live.make_cache()
    return caches


def pack_cache(model: Any, caches: Sequence[Any], codec: str = "tq3") -> list[Any]:
    """Return packed copies of caches that mlx_lm has filled.

    With them a prompt is computed on the exact KV, and its answer on the packed KV.

    ``caches``: those of ``mlx_lm.models.cache.make_prompt_cache(model)``, for one prompt. They are
    not changed; drop them to free their memory.

    Raises:
        ValueError: as ``make_cache``; or these are not plain caches of this model.
    """
    packed = make_cache(model, codec)
    if len(caches) != len(packed) or not all(map(_is_plain, caches)):
        raise ValueError(f"{len(packed)} plain KV caches of mlx_lm, of one prompt, are wanted")
    for old, new in zip(caches, packed, strict=True):
        if not old.empty():
            keys, values = (x[:, :, : old.offset] for x in (old.keys, old.values))
            mx.eval(keys, values)  # the cache looks at values to see whether they can be packed
            new.append(keys, values)
            new.pack_old()
    return packed


def _is_plain(cache: Any) -> bool:
    return type(cache) is KVCache and (cache.keys is None or len(cache.keys) == 1)


def attending(model: Any) -> AbstractContextManager[None]:
    """Let a model attend to packed rows without restoring them, inside a ``with`` block.

    Replaces ``scaled_dot_product_attention`` in the model's module for that time. Has no effect on
    models that do not use mlx_lm's function.
    """
    return packed_model.attending(model)


def capture(
    model: Any, tokens: Sequence[Sequence[int]], *, progress: bool | None = None
) -> Samples:
    """Compute the KV of some texts and how much errors in it matter, for ``learn``.

    ``tokens``: the token ids of each text. The result has the layout, the model's rotary
    embedding, K and V of all layers of each text as numpy arrays (heads, tokens, dim), and how
    sensitive the last quarter of each text is to errors in the KV before it. ``progress``: whether
    to write progress to stderr; None = only on a terminal.

    Raises:
        ValueError: the model's cache cannot be packed, its rotary embedding is not known, or there
            is no text.
    """
    from engines.calibration.learn import TextReader

    if not tokens or not all(map(len, tokens)):
        raise ValueError("token ids of one text or more are wanted")
    reader = TextReader(instrument(model), on_progress=reporter("capture", progress))
    return reader.samples(tokens)


def layout_of(model: Any) -> KVLayout:
    """Return the layout of a model's growing caches; compute three tokens.

    Raises:
        ValueError: the caches cannot be packed; the message says why.
    """
    return instrument(model).layout


def instrument(model: Any) -> MlxInstrument:
    """Return an ``engines.calibration.instrument.Instrument`` that measures a model of mlx_lm.

    It has no tokenizer, so it cannot encode text. Raises ``ValueError`` as ``layout_of``.
    """
    from engines.mlx_worker.measuring.instrument import MlxInstrument
    from engines.mlx_worker.model.loading import LoadedModel

    try:
        return MlxInstrument(LoadedModel(model, _NoTokenizer(), {}), probe(model))
    except CannotServe as error:
        raise ValueError(str(error)) from error


class _NoTokenizer:
    """Stands for a tokenizer, and encodes every text to an empty list."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return []
