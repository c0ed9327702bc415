"""Refuses what the engine would refuse, before it reads the weights.

``serve`` asks here before it starts anything, ``plan`` and ``doctor`` before they promise anything.
The engine looks at the model's real caches and decides for itself; here only that is refused which
is certain from config.json and the settings.
"""

from __future__ import annotations

from engines.kv_budget import HOT_CODECS
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import AUTO
from kvstore.errors import UnknownCodec
from launch.errors import UsageError
from launch.families.cache_shape import CacheShape, ModelRefused, NotUnderstood
from launch.model.find import Model
from launch.plan.hot_budget import hot_budget_of, served_cache
from launch.settings.effective_settings import EffectiveSettings


def check_served(effective: EffectiveSettings, model: Model) -> None:
    """Check everything of the model's cache. Raises ``UsageError``; says why."""
    check_family(effective, model)
    check_hot_codec(effective, model)
    check_hot_budget(effective, model)


def check_family(effective: EffectiveSettings, model: Model) -> None:
    """Refuse a model that the engine cannot serve. Raises ``UsageError``; says why."""
    try:
        _known_cache(effective, model)
    except ModelRefused as error:
        raise UsageError(f"{model.name} cannot be served: {error}") from error


def check_hot_codec(effective: EffectiveSettings, model: Model) -> None:
    """Refuse an ``engine.hot_codec`` that cannot be followed. Raises ``UsageError``; says why."""
    engine, store = effective.settings.engine, effective.settings.store
    if not engine.hot_codec:
        return
    refused = f"engine.hot_codec = {engine.hot_codec} is refused: "
    if effective.engine_kind != "mlx":
        raise UsageError(
            f"{refused}only the mlx engine can keep live KV packed, not {effective.engine_kind};"
            " leave it empty"
        )
    from kvstore.codecs.rows.packed_codec import packed_codec

    layout = PackedLayout(dtype="bfloat16", layers=(), num_bits=HOT_CODECS[engine.hot_codec])
    if store.codec != AUTO:  # else sessions sleep in the live cache's own codec
        try:
            packed_codec(codec_by_name(store.codec), layout)
        except UnknownCodec as error:
            raise UsageError(f"{refused}{error} (store.codec)") from error
    shape = _known_cache(effective, model)
    if shape is not None and (reason := _unfit(shape, engine.hot_codec)):
        raise UsageError(f"{refused}{reason}; leave it empty")


def _unfit(shape: CacheShape, hot_codec: str) -> str:
    """The reason why this cache cannot be kept packed; "" if none is known."""
    from kvstore.codecs.rows.rotated_rows import RotatedRows

    if shape.needs_state:
        return "only plain KV caches can be kept packed, and this model has windows or states"
    if shape.has_latents:
        return "only plain KV caches can be kept packed, and this model keeps latents"
    rows = RotatedRows(HOT_CODECS[hot_codec])
    dims = {dim for x in shape.growing for dim in (x.head_dim, x.value_dim)}
    if strange := sorted(x for x in dims if not rows.supports(x)):
        return f"it cannot pack vectors of {strange[0]} values"
    return shape.exact_only


def check_hot_budget(effective: EffectiveSettings, model: Model) -> None:
    """Refuse a budget for live KV that the engine would refuse.

    Raises:
        UsageError: the budget is too little; says how much is needed.
    """
    if effective.engine_kind not in ("mlx", "vllm"):
        return
    shape = _known_cache(effective, model)
    if shape is None:
        return
    if refusal := hot_budget_of(effective, model.config(), shape).refusal():
        raise UsageError(f"engine.{refusal}")


def _known_cache(effective: EffectiveSettings, model: Model) -> CacheShape | None:
    """The model's cache; None where only the engine knows it. Raises ``ModelRefused``."""
    if model.folder is None or effective.engine_kind not in ("mlx", "vllm"):
        return None
    try:
        return served_cache(effective, model.config())
    except ModelRefused:
        raise
    except NotUnderstood:
        return None
