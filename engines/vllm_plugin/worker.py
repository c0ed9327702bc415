"""Puts a worker's half together, once vLLM shows its KV caches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from engines.calibration.served import ServedCodecs
from engines.config import vllm_rank_folder
from engines.vllm_plugin.affinity import roaming
from engines.vllm_plugin.arrangement import UnknownLayout, WriteBlock, probe
from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.device_check import blocks_for
from engines.vllm_plugin.fingerprint import fingerprint
from engines.vllm_plugin.groups import Groups, StateGroup
from engines.vllm_plugin.messages import RankHello, RankLost, RankSaved
from engines.vllm_plugin.paging import PagedCache, paged_cache
from engines.vllm_plugin.plan import Save, Step
from engines.vllm_plugin.rank import RankLink, StagingArea, packed_bytes_per_token
from engines.vllm_plugin.state import Layers, RecurrentLayers, StatefulBlocks, WindowLayers
from engines.vllm_plugin.streams import SideStream
from engines.vllm_plugin.transfer import Transfer
from kvstore.block_keys import BlockKeys
from kvstore.block_store import BlockStore
from kvstore.chunk_size import chunk_tokens
from kvstore.config import StoreConfig
from kvstore.errors import TierInUse, TierUnavailable
from kvstore.packer import Packer
from kvstore.records import SessionRef
from kvstore.stats import StoreStats
from kvstore.tiers.base import Tier
from kvstore.tiers.registry import open_tiers

logger = logging.getLogger("thermocline.vllm")

# What a calibration would refuse.
SPARE_SHARE: Final = 4  # of what may wait to be saved, as much may lie ready to unpack into
HAS_STATE: Final = "some of its layers do not keep all tokens"
MANY_RANKS: Final = "each of its ranks has heads of its own"


class Worker:
    """One rank: vLLM's blocks, the cold store, and the way to the hub.

    Raises:
        UnknownLayout, CodecRefused, UnknownCodec, TierInUse: with a sentence that says what to do.
        ValueError, ImportError: see ``open_tiers``.
    """

    @roaming()  # the threads of the store and of the link are started here
    def __init__(
        self,
        settings: PluginSettings,
        vllm_config: Any,
        rank: int,
        caches: Mapping[str, torch.Tensor],
        groups: Groups,
    ) -> None:
        self._cache = attention_cache(vllm_config, caches, groups.layers)
        config = rank_share(settings.store, vllm_config.parallel_config.world_size)
        identity = fingerprint(vllm_config, rank, Path(settings.disk_path), groups)
        data = Path(settings.data_path or settings.disk_path)
        unmeasurable = HAS_STATE if groups.states else ""
        if vllm_config.parallel_config.world_size > 1:
            unmeasurable = MANY_RANKS
        codecs = ServedCodecs(config, self._cache.layout, identity, data, unmeasurable)
        packer = Packer(codecs.codecs, self._cache.layout, identity)
        size = chunk_tokens(config, self._cache.block_tokens)
        keys = BlockKeys(identity, self._cache.block_tokens, size // self._cache.block_tokens)
        disk = vllm_rank_folder(Path(settings.disk_path), rank)
        tiers = usable_tiers(config, disk)
        self._store = BlockStore(
            config, packer, keys, identity, tiers, has_state=bool(groups.states)
        )
        self._staging = StagingArea()
        self._patience_s = 0.0
        spare_bytes = config.save_queue_bytes // SPARE_SHARE
        blocks = blocks_for(self._cache, self._store, spare_bytes)
        if groups.states:
            layers = [state_layers(vllm_config, caches, x) for x in groups.states]
            stream = SideStream(self._cache.device)
            blocks = StatefulBlocks(blocks, groups.states, layers, self._store, stream)
        self._transfer = Transfer(blocks, self._store, self._staging, config.save_queue_bytes)
        packed = packed_bytes_per_token(self._store)
        hello = RankHello(rank, codecs.codecs.ram.id, self._cache.layout.bytes_per_token, packed)
        self._link = RankLink(
            settings.hub_path,
            hello,
            self._store,
            self._staging,
            self._stats,
            self._transfer.wait_saved,
            codecs,
        )
        self._store.listen(self._lost)
        ways = type(self._cache.sides[0][0]).__name__, type(blocks).__name__
        logger.info("rank %d: %s, %s", rank, *ways)

    def start_loads(self, step: Step) -> None:
        self._patience_s = step.patience_s
        for load in step.loads:
            self._transfer.load(load)

    def start_saves(self, step: Step) -> None:
        for save in step.saves:
            self._transfer.save(save, self._saved)

    def take_loaded(self) -> set[str]:
        """The first of what vLLM asks for at the end of a step."""
        self._transfer.wait_for_news(self._patience_s)
        return self._transfer.take_loaded()

    def take_failed(self, loaded: set[str]) -> set[str]:
        return self._transfer.take_failed(loaded)

    def take_bad_blocks(self) -> set[int]:
        return self._transfer.take_bad_blocks()

    def take_acks(self) -> tuple[dict[int, int], set[int]]:
        """And which of them were skipped."""
        acks = self._transfer.take_acks()
        return acks, self._transfer.take_skipped(acks)

    def close(self) -> None:
        """First the saves: they want the store, and the link to tell of how they ended."""
        self._transfer.close()
        self._link.close()
        self._store.close()

    def _lost(self, session: SessionRef) -> None:
        self._link.send(RankLost(session))

    def _saved(self, save: Save, kept: bool) -> None:
        self._link.send(RankSaved(save.job, save.session, kept))

    def _stats(self) -> StoreStats:
        return self._store.stats(self._transfer.queued_bytes)


def rank_share(store: StoreConfig, num_ranks: int) -> StoreConfig:
    """The budgets are the engine's; its ranks share them."""
    return msgspec.structs.replace(
        store,
        ram_bytes=store.ram_bytes // num_ranks,
        disk_bytes=store.disk_bytes // num_ranks,
        redis_bytes=store.redis_bytes // num_ranks,
        save_queue_bytes=store.save_queue_bytes // num_ranks,
        write_queue_bytes=store.write_queue_bytes // num_ranks,
        index_bytes=store.index_bytes // num_ranks,
    )


def usable_tiers(config: StoreConfig, folder: Path) -> list[Tier]:
    """Without the disk if it cannot be used: it may be full or gone at any restart.

    Raises:
        TierInUse: another engine has the folder, which is a mistake of whoever started both.
        ValueError, ImportError: see ``open_tiers``.
    """
    try:
        return open_tiers(config, folder)
    except TierInUse:
        raise
    except TierUnavailable as error:
        logger.warning("cold sessions are not kept on disk: %s", error)
    return open_tiers(msgspec.structs.replace(config, disk_bytes=0), folder)


def block_writer(vllm_config: Any, caches: Mapping[str, torch.Tensor]) -> WriteBlock:
    """The backend's own way to write a block, for the probe."""
    name, cache = next(iter(caches.items()))
    layer: Any = get_layers_from_vllm_config(vllm_config, Attention, [name]).get(name)
    if layer is None:
        raise UnknownLayout(f"layer {name} is no attention layer that can be probed")
    slots = torch.arange(cache.shape[2], device=cache.device)

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, block, slots)

    return write


def attention_cache(
    vllm_config: Any, caches: Mapping[str, torch.Tensor], layers: Sequence[str]
) -> PagedCache:
    own = {name: x for name, x in caches.items() if name in layers}
    first = next(iter(own.values()))
    whole = int(vllm_config.cache_config.block_size)
    if first.shape[2] != whole:
        raise UnknownLayout(
            f"the attention backend cuts blocks of {whole} tokens into ones of {first.shape[2]};"
            " choose another with --attention-backend"
        )
    return paged_cache(own, probe(first, block_writer(vllm_config, own)))


def state_layers(vllm_config: Any, caches: Mapping[str, torch.Tensor], group: StateGroup) -> Layers:
    if group.recurrent:
        return RecurrentLayers([x for name, x in caches.items() if name in group.layers])
    return WindowLayers(attention_cache(vllm_config, caches, group.layers))
