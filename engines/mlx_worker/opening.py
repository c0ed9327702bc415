"""Opens the cold store for the model that was loaded, or says why there is none.

Whatever stands in the way of hibernation never stands in the way of serving.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from engines.mlx_worker.fingerprint import fingerprint
from engines.mlx_worker.layout import CachePlan
from engines.mlx_worker.loading import LoadedModel
from engines.mlx_worker.selftest import why_not
from kvstore.codec_set import open_codecs
from kvstore.codecs.base import Codec
from kvstore.codecs.packed_array import PackedLayout
from kvstore.codecs.packed_codec import packed_codec
from kvstore.codecs.presets import codec_by_name, warm
from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable, UnknownCodec
from kvstore.store import ColdStore
from kvstore.tiers.base import Tier
from kvstore.tiers.registry import open_tiers

logger = logging.getLogger(__name__)


def store_opener(
    config: StoreConfig, name: str
) -> Callable[[LoadedModel, CachePlan], ColdStore | str]:
    """For ``Owner``: called on its thread once the model is loaded."""

    def open_store(loaded: LoadedModel, plan: CachePlan) -> ColdStore | str:
        if reason := why_not(loaded.model, plan, loaded.vocab_size):
            return reason
        assert plan.layout is not None
        try:
            codecs = open_codecs(config, lambda codec: _codec(codec, plan))
        except UnknownCodec as error:
            return f"{error}; choose another codec"
        tiers = _tiers(config)
        if not tiers:
            return "every tier of the cold store is switched off"
        return ColdStore(
            config,
            plan.layout,
            fingerprint(loaded, plan, Path(config.disk_path) if config.disk_path else None),
            name,
            codecs,
            tiers,
            needs_state=plan.needs_state,
        )

    return open_store


def _codec(name: str, plan: CachePlan) -> Codec:
    codec = codec_by_name(name)
    if isinstance(plan.layout, PackedLayout):
        codec = packed_codec(codec, plan.layout)
    if plan.layout is not None and plan.layout.layers:
        codec.check(plan.layout)
        warm(codec, plan.layout)
    return codec


def _tiers(config: StoreConfig) -> list[Tier]:
    try:
        return open_tiers(config, Path(config.disk_path))
    except TierUnavailable as error:
        logger.warning("cold sessions are not kept on disk: %s", error)
    return open_tiers(msgspec.structs.replace(config, disk_bytes=0), Path(config.disk_path))
