"""Opens the cold store for a loaded model, or says why there is none.

No trouble with hibernation ever stands in the way of serving, but for two mistakes
of the operator: a codec that was named and costs this model more than the bound, and
a data folder that another engine has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from engines.calibration.gate.served_codecs import MeasuredModel, ServedCodecs
from engines.mlx_worker.cache.layout import CachePlan, CannotServe, probe
from engines.mlx_worker.model.fingerprint import fingerprint
from engines.mlx_worker.model.loading import LoadedModel
from engines.mlx_worker.sessions.selftest import restore_fault
from kvstore.chunk_size import chunk_tokens
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, TierInUse, UnknownCodec
from kvstore.membership import joined
from kvstore.roster import Facts
from kvstore.shapes import StoredModel
from kvstore.store.token_store import ColdStore
from kvstore.tiers.base import Tier
from kvstore.tiers.registry import open_usable_tiers


@dataclass(frozen=True)
class OpenedStore:
    """A cold store, and the codecs it was opened with."""

    store: ColdStore
    codecs: ServedCodecs  # those of the store; it may adopt others


def tiers_of_settings(config: StoreConfig) -> list[Tier]:
    """Open the tiers that the settings ask for. Raises ``TierInUse``."""
    return open_usable_tiers(config, Path(config.disk_path))


def store_opener(
    config: StoreConfig,
    name: str,
    data_path: str = "",
    tiers_of: Callable[[StoreConfig], list[Tier]] = tiers_of_settings,
) -> Callable[[LoadedModel, CachePlan], OpenedStore | str]:
    """Make the function by which ``Owner`` opens its store, on its thread, for its model.

    That function raises ``CannotServe`` for a codec that the settings name and the gate refuses,
    and for a data folder that another engine has.

    Args:
        name: what clients call the model.
        data_path: the folder of models' profiles; "" = beside the disk tier.
        tiers_of: opens the tiers, fastest first.
    """
    folder = Path(config.disk_path) if config.disk_path else None
    data = Path(data_path) if data_path else folder

    def open_store(loaded: LoadedModel, plan: CachePlan) -> OpenedStore | str:
        if reason := restore_fault(loaded.model, plan, loaded.vocab_size):
            return reason
        assert plan.layout is not None
        identity = fingerprint(loaded, plan, folder)
        try:
            measured = _measured_as(loaded, plan, folder)
            known = (config, plan.layout, identity, data)
            codecs = ServedCodecs(*known, states=plan.states, measured=measured)
        except CodecRefused as error:
            raise CannotServe(str(error)) from error
        except UnknownCodec as error:
            return f"{error}; choose another codec"
        try:
            tiers = tiers_of(config)
        except TierInUse as error:
            raise CannotServe(str(error)) from error
        if not tiers:
            return "every tier of the cold store is switched off"
        windows = plan.states.windows if plan.states else None
        model = StoredModel(name, identity, plan.layout, plan.needs_state, windows)
        facts = Facts(
            model=name,
            fingerprint=identity,
            chunk_tokens=chunk_tokens(config),
            encrypt=config.encrypt,
        )
        company = joined(
            config, lambda: msgspec.structs.replace(facts, codec=codecs.codecs.redis.id)
        )
        store = ColdStore(config, model, codecs.codecs, tiers)
        store.ledger.join(company)
        return OpenedStore(store, codecs)

    return open_store


def _measured_as(loaded: LoadedModel, plan: CachePlan, folder: Path | None) -> MeasuredModel | None:
    """The model with a plain live cache, as it is measured; None = it has one."""
    if not isinstance(plan.layout, PackedLayout):
        return None
    plain = replace(loaded, model=loaded.model.model)
    plain_plan = probe(plain.model)
    assert plain_plan.layout is not None
    return MeasuredModel(fingerprint(plain, plain_plan, folder), plain_plan.layout)
