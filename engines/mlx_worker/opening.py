"""Opens the cold store for the model that was loaded, or says why there is none.

Whatever stands in the way of hibernation never stands in the way of serving, but for one: a codec
that was named, and that costs this model more than the bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engines.calibration.served import ServedCodecs
from engines.mlx_worker.fingerprint import fingerprint
from engines.mlx_worker.layout import CachePlan, CannotServe
from engines.mlx_worker.loading import LoadedModel
from engines.mlx_worker.selftest import why_not
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, TierUnavailable, UnknownCodec
from kvstore.store import ColdStore
from kvstore.tiers.base import Tier
from kvstore.tiers.registry import open_tiers

logger = logging.getLogger(__name__)

NEEDS_STATE: Final = "a part of its cache cannot be cut to a length"


@dataclass(frozen=True)
class Opened:
    store: ColdStore
    codecs: ServedCodecs  # those of the store, and what may become of them


def store_opener(
    config: StoreConfig, name: str, data_path: str = ""
) -> Callable[[LoadedModel, CachePlan], Opened | str]:
    """For ``Owner``: called on its thread once the model is loaded. Raises ``CannotServe``.

    ``data_path``: where profiles of models lie; "" = beside the disk tier.
    """
    folder = Path(config.disk_path) if config.disk_path else None
    data = Path(data_path) if data_path else folder

    def open_store(loaded: LoadedModel, plan: CachePlan) -> Opened | str:
        if reason := why_not(loaded.model, plan, loaded.vocab_size):
            return reason
        assert plan.layout is not None
        identity = fingerprint(loaded, plan, folder)
        unmeasurable = NEEDS_STATE if plan.needs_state else ""
        try:
            codecs = ServedCodecs(config, plan.layout, identity, data, unmeasurable)
        except CodecRefused as error:
            raise CannotServe(str(error)) from error
        except UnknownCodec as error:
            return f"{error}; choose another codec"
        tiers = _tiers(config)
        if not tiers:
            return "every tier of the cold store is switched off"
        store = ColdStore(
            config,
            plan.layout,
            identity,
            name,
            codecs.codecs,
            tiers,
            needs_state=plan.needs_state,
        )
        return Opened(store, codecs)

    return open_store


def _tiers(config: StoreConfig) -> list[Tier]:
    try:
        return open_tiers(config, Path(config.disk_path))
    except TierUnavailable as error:
        logger.warning("cold sessions are not kept on disk: %s", error)
    return open_tiers(msgspec.structs.replace(config, disk_bytes=0), Path(config.disk_path))
