"""Refuses settings of live KV that the engine would refuse, before it reads the weights.

The engine looks at the model's real caches and decides for itself; here only that is refused which
is certain from config.json.
"""

from __future__ import annotations

from engines.packed_budget import HOT_CODECS
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import AUTO
from kvstore.errors import UnknownCodec
from launch.errors import UsageError
from launch.model import Model
from launch.plan.cache_shape import CacheShape, NotUnderstood
from launch.plan.families.table import cache_shape
from launch.plan.hot_budget import hot_budget_of
from launch.settings.effective_settings import EffectiveSettings


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
    for name in ("codec", "disk_codec", "redis_codec"):
        codec: str = getattr(store, name)
        if codec in ("", AUTO):  # then sessions sleep in the live cache's own codec
            continue
        try:
            packed_codec(codec_by_name(codec), layout)
        except UnknownCodec as error:
            raise UsageError(f"{refused}{error} (store.{name})") from error
    if reason := _unfit(model):
        raise UsageError(f"{refused}{reason}; leave it empty")


def _unfit(model: Model) -> str:
    """The reason why this model's cache cannot be kept packed; "" if none is known."""
    if model.folder is None:
        return ""
    try:
        shape: CacheShape = cache_shape(model.config())
    except NotUnderstood:  # the engine looks at the real cache
        return ""
    if shape.needs_state:
        return "only plain KV caches can be kept packed, and this model has windows or states"
    return shape.exact_only


def check_hot_budget(effective: EffectiveSettings, model: Model) -> None:
    """Refuse a budget for live KV that the engine would refuse, before it reads the weights.

    Raises:
        UsageError: the budget is too little; says how much is needed.
    """
    if effective.engine_kind not in ("mlx", "vllm") or model.folder is None:
        return
    content = model.config()
    try:
        shape = cache_shape(content)
    except NotUnderstood:  # the engine looks at the real cache and decides for itself
        return
    if refusal := hot_budget_of(effective, content, shape).refusal():
        raise UsageError(f"engine.{refusal}")
