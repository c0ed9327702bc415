"""Whether live KV can be kept packed (``engine.hot_codec``), as far as can be told beforehand.

The engine looks at the model's real caches and decides for itself; what is certain before the
weights are read is refused here.
"""

from __future__ import annotations

from engines.packed_budget import HOT_CODECS
from kvstore.codecs.packed_array import PackedLayout
from kvstore.codecs.packed_codec import packed_codec
from kvstore.codecs.presets import codec_by_name
from kvstore.config import AUTO
from kvstore.errors import UnknownCodec
from launch.cache_shape import CacheShape, NotUnderstood
from launch.effective import Effective
from launch.errors import UsageError
from launch.families import cache_shape
from launch.model import Model


def check_hot_codec(effective: Effective, model: Model) -> None:
    """Raises ``UsageError``: it is set, and cannot be followed; says why."""
    engine, store = effective.settings.engine, effective.settings.store
    if not engine.hot_codec:
        return
    refused = f"engine.hot_codec = {engine.hot_codec} is refused: "
    if effective.engine_kind != "mlx":
        raise UsageError(
            f"{refused}only the mlx engine can keep live KV packed, not {effective.engine_kind};"
            " leave it empty"
        )
    layout = PackedLayout(dtype="bfloat16", layers=(), num_bits=HOT_CODECS[engine.hot_codec])
    for name in ("codec", "disk_codec", "redis_codec"):
        codec: str = getattr(store, name)
        if codec in ("", AUTO):  # then it is the live cache's own
            continue
        try:
            packed_codec(codec_by_name(codec), layout)
        except UnknownCodec as error:
            raise UsageError(f"{refused}{error} (store.{name})") from error
    if reason := _unfit(model):
        raise UsageError(f"{refused}{reason}; leave it empty")


def _unfit(model: Model) -> str:
    if model.folder is None:
        return ""
    try:
        shape: CacheShape = cache_shape(model.config())
    except NotUnderstood:  # the engine looks at the real cache
        return ""
    if shape.needs_state:
        return "only plain KV caches can be kept packed, and this model has windows or states"
    return shape.exact_only
