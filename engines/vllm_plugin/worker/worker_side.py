"""Assembles the worker side of the plug-in, once vLLM has registered its KV caches."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention

from engines.calibration.gate.served_codecs import ServedCodecs
from engines.config import vllm_rank_folder
from engines.vllm_plugin.blocks.block_layout import BlockLayout, UnknownLayout, probe, probe_latents
from engines.vllm_plugin.blocks.blocks import Blocks
from engines.vllm_plugin.blocks.paging import PagedCache, paged_cache
from engines.vllm_plugin.blocks.state_layers import (
    RecurrentLayers,
    StateBlocks,
    StateLayers,
    StatePart,
    WindowLayers,
)
from engines.vllm_plugin.blocks.stateful_blocks import StatefulBlocks
from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.device.accelerator import stream_of
from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.inventory import wants_events
from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.measuring.rank_measuring import RankMeasuring
from engines.vllm_plugin.measuring.request_runner import unmeasurable
from engines.vllm_plugin.messages import RankHello, RankLost, RankSaved
from engines.vllm_plugin.plan import Save, StepWork
from engines.vllm_plugin.process.processes import unbound_threads
from engines.vllm_plugin.support import layer_specs
from engines.vllm_plugin.worker.fingerprint import fingerprint
from engines.vllm_plugin.worker.rank import RankLink, StagingArea, packed_bytes_per_token
from engines.vllm_plugin.worker.resting_watch import RestingWatch
from engines.vllm_plugin.worker.transfer import Ended, RankBlocks, Transfer
from engines.wire import BF16_BYTES, KVSize
from kvstore.config import StoreConfig
from kvstore.ledger.notices import StoreNotice
from kvstore.likeness import StoredAs, likeness_of
from kvstore.session import chunk_of_blocks
from kvstore.shapes import KVLayout, StateLayout, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.registry import open_usable_tiers

logger = logging.getLogger("thermocline.vllm")

# Work that does not need the model waits until vLLM has run no step for this long.
QUIET_S: Final = 1.0
# Idle buffers for unpacking may take 1 / SPARE_SHARE of the bytes that may wait to be saved.
SPARE_SHARE: Final = 4

# Makes the object that copies the blocks of a cache, for at most so many bytes of idle buffers.
ChooseBlocks: TypeAlias = Callable[[PagedCache, ColdStore, int], Blocks]


class WorkerSide:
    """One rank's copies, its cold store, and its connection to the hub. On the worker's thread."""

    def __init__(
        self,
        transfer: Transfer,
        link: RankLink,
        store: ColdStore,
        measuring: RankMeasuring,
        resting: RestingWatch | None = None,
    ) -> None:
        """``resting``: reports the store's blocks, if vLLM reports KV events."""
        self._transfer = transfer
        self._link = link
        self._store = store
        self.measuring = measuring
        self._resting = resting
        self._wait_s = 0.0
        self._stepped_at = float("-inf")  # monotonic
        store.listen(self._store_changed)
        store.pack_when(self._is_quiet)

    def start_loads(self, step: StepWork) -> None:
        """Begin the step's loads."""
        self._wait_s = step.wait_s
        self._stepped_at = time.monotonic()
        EXCHANGE.fill(step.given)
        self._transfer.note_filled(x.request_id for x in step.given)
        for load in step.loads:
            self._transfer.load(load)

    def start_saves(self, step: StepWork) -> None:
        """Begin the step's saves, after the model has run."""
        for save in step.saves:
            self._transfer.save(save, self._saved)
        EXCHANGE.read(step.wanted)
        self._transfer.note_read(x.job for x in step.wanted)

    def pop_ended(self) -> Ended:
        """Return what has ended by the end of a step.

        If the model has no work, this waits for news for a moment.
        """
        return self._transfer.pop_ended(self._wait_s)

    def close(self) -> None:
        """End the saves first: they need the store, and the link to report how they ended."""
        self.measuring.close()
        self._transfer.close()
        if self._resting is not None:
            self._resting.close()
        self._link.close()
        self._store.close()

    def _is_quiet(self) -> bool:
        """True if vLLM has run no step for a moment, and no copy is under way. Any thread."""
        if time.monotonic() - self._stepped_at < QUIET_S or self._link.num_staging:
            return False
        return self._transfer.is_settled and self.measuring.has_verdict

    def _store_changed(self, notice: StoreNotice) -> None:
        if self._resting is not None:
            self._resting.note(notice.session)
        self._link.send(RankLost(*notice))

    def _saved(self, save: Save, kept: bool) -> None:
        if self._resting is not None:
            self._resting.look_at(save.session)
        self._link.send(RankSaved(save.job, save.session, kept))


@unbound_threads()  # the threads of the store and of the link are started here
def open_worker_side(
    settings: PluginSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    caches: Mapping[str, torch.Tensor],
    groups: Groups,
    choose_blocks: ChooseBlocks,
) -> WorkerSide:
    """Open the rank's store and connect it to vLLM's caches, given by layer name, and to the hub.

    Raises:
        UnknownLayout, CodecRefused, UnknownCodec, TierInUse: with a sentence that names the fix.
        ValueError, ImportError: see ``open_tiers``.
    """
    rank = int(vllm_config.parallel_config.rank)
    cache = attention_cache(vllm_config, caches, groups.layers)
    states = state_blocks(vllm_config, kv_cache_config, caches, groups)
    layout = states.layout if states is not None else None
    why = unmeasurable(vllm_config)
    identity = fingerprint(vllm_config, rank, Path(settings.disk_path), groups)
    num_ranks = int(vllm_config.parallel_config.world_size)
    config = rank_share(settings.store, num_ranks)
    codecs = ServedCodecs(config, cache.layout, identity, settings.data_folder, why, layout)
    store = _open_store(settings, config, rank, cache, layout, codecs, identity)
    blocks = choose_blocks(cache, store, config.save_queue_bytes // SPARE_SHARE)
    stateful = None
    if states is not None:
        stateful = StatefulBlocks(states, store, stream_of(cache.device), cache.block_tokens)
    staging = StagingArea()
    transfer = Transfer(RankBlocks(blocks, stateful, store, cache.block_tokens), staging)
    measuring = RankMeasuring(
        settings,
        vllm_config,
        cache,
        states,
        groups,
        identity,
        send=lambda message: link.send(message),
        adopt=lambda: link.adopt(),
    )
    sizes = cache.layout.bytes_per_token, packed_bytes_per_token(store)
    link = RankLink(
        settings.hub_path,
        RankHello(rank, *sizes, *kv_sizes(cache.layout, states)),
        store,
        cache.block_tokens,
        staging,
        lambda: blocks.why_host,
        codecs,
        measuring,
    )
    # Several ranks measure only for a first verdict: they do not learn on, nor time again.
    if config.calibrate and (
        codecs.has_open_questions if num_ranks == 1 else codecs.report.unmeasured
    ):
        measuring.begin(codecs)
    resting = None
    if rank == 0 and wants_events(vllm_config):
        resting = RestingWatch(store, cache.block_tokens, link.send)
        link.watch(resting)
        resting.begin()
    codecs.compile_rest()
    ways = type(cache.views[0][0]).__name__, type(blocks).__name__
    logger.info("rank %d: %s, %s", rank, *ways)
    return WorkerSide(transfer, link, store, measuring, resting)


def _open_store(
    settings: PluginSettings,
    config: StoreConfig,
    rank: int,
    cache: PagedCache,
    layout: StateLayout | None,
    codecs: ServedCodecs,
    identity: str,
) -> ColdStore:
    """Open the store of a rank with this fingerprint; ``layout``: None if it has no states."""
    kept = layout or StateLayout()
    model = StoredModel(
        f"{settings.served_model_name} rank {rank}",
        identity,
        cache.layout,
        layout is not None,
        kept.windows,
        kept.window_tokens,
    )
    tiers = open_usable_tiers(config, vllm_rank_folder(Path(settings.disk_path), rank))
    size = chunk_of_blocks(cache.block_tokens)
    store = ColdStore(config, model, codecs.codecs, tiers, chunk_tokens=size)
    stored = StoredAs(
        model=settings.served_model_name,
        part=f"rank {rank}",
        fingerprint=identity,
        chunk_tokens=size,
        encrypt=config.encrypt,
        hash_seed=os.environ.get("PYTHONHASHSEED", ""),  # as vLLM itself reads it
    )
    store.ledger.likeness = likeness_of(config, stored)
    store.ledger.profiles.opened = codecs.opened
    return store


def kv_sizes(layout: KVLayout, states: StateBlocks | None) -> tuple[KVSize, KVSize]:
    """The bytes of a session's KV on this rank, live and in bf16."""
    live, bf16 = KVSize(layout.bytes_per_token), KVSize(layout.elements_per_token * BF16_BYTES)
    if states is None:
        return live, bf16
    return live + states.kv_size(), bf16 + states.kv_size(BF16_BYTES)


def rank_share(store: StoreConfig, num_ranks: int) -> StoreConfig:
    """One rank's share of the engine's budgets."""
    return msgspec.structs.replace(
        store,
        ram_bytes=store.ram_bytes // num_ranks,
        disk_bytes=store.disk_bytes // num_ranks,
        save_queue_bytes=store.save_queue_bytes // num_ranks,
        index_bytes=store.index_bytes // num_ranks,
    )


def layout_of(vllm_config: Any, name: str, cache: torch.Tensor) -> BlockLayout:
    """Find where a layer's attention backend puts K and V, or latents and rotary keys.

    Raises ``UnknownLayout``: the places are not found, or the layer is no attention layer.
    """
    kinds: Any = (Attention, MLAAttention)
    layer: Any = get_layers_from_vllm_config(vllm_config, kinds, [name]).get(name)
    if layer is None:
        raise UnknownLayout(f"layer {name} is no attention layer that can be probed")
    slots = torch.arange(cache.shape[2], device=cache.device)

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, block, slots)

    def write_latents(latents: torch.Tensor, rotary: torch.Tensor, block: torch.Tensor) -> None:
        # The kernel takes blocks of rows, without an axis for heads.
        scale = torch.ones((), dtype=torch.float32, device=block.device)
        rows = latents[:, 0], rotary, block[:, 0]
        layer.impl.do_kv_cache_update(*rows, slots, layer.kv_cache_dtype, scale)

    if isinstance(layer, MLAAttention):
        return probe_latents(cache, int(layer.kv_lora_rank), write_latents)
    return probe(cache, write)


def attention_cache(
    vllm_config: Any, caches: Mapping[str, torch.Tensor], layers: Sequence[str]
) -> PagedCache:
    """The caches of these layers, with the attention backend's places of K and V.

    Raises ``UnknownLayout``: the caches cannot be read.
    """
    own = {name: x for name, x in caches.items() if name in layers}
    first = next(iter(own.values()))
    whole = int(vllm_config.cache_config.block_size)
    if first.shape[2] != whole:
        raise UnknownLayout(
            f"the attention backend splits blocks of {whole} tokens into ones of {first.shape[2]};"
            " choose another with --attention-backend"
        )
    name = next(iter(own))
    has_latents = bool(get_layers_from_vllm_config(vllm_config, MLAAttention, [name]))
    return paged_cache(own, layout_of(vllm_config, name, first), has_latents)


def state_blocks(
    vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor], groups: Groups
) -> StateBlocks | None:
    """The layers that do not keep all tokens; None if all do. Raises like ``attention_cache``."""
    layers: list[StateLayers] = []
    num_windows = 0
    for group in groups.states:
        if group.recurrent:
            spec = layer_specs(kv_cache_config.kv_cache_groups[group.id].kv_cache_spec)[0]
            found = zip(spec.dtypes, map(tuple, spec.shapes), strict=True)
            parts = [StatePart(dtype, shape) for dtype, shape in found]
            own = [x for name, x in caches.items() if name in group.layers]
            layers.append(RecurrentLayers(own, parts))
        else:
            cache = attention_cache(vllm_config, caches, group.layers)
            layers.append(WindowLayers(cache, num_windows))
            num_windows += 2 * len(cache.layout.layers)
    return StateBlocks(groups.states, layers) if layers else None
