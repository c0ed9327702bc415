"""Publishes the plug-in's figures among vLLM's metrics, and its blocks as vLLM's KV events.

Metrics are for deployments that scrape vLLM itself. The gateway gets the same report, so both show
the same figures. The report is fetched when vLLM runs a step, at most once a second. Between turns
vLLM publishes nothing, so its figures are those of the last step; the gateway fetches a report
whenever it is scraped.

Changes of the inventory become vLLM's events, which its publisher sends. vLLM's events of blocks on
the GPU contain the cache salt of block 0 in clear text. Ours have no ``extra_keys`` and no
``session_id``: the block's hash, which includes the salt, identifies the block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec
from prometheus_client import Counter, Gauge
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.inventory import BlocksRemoved, Change, Inventory
from engines.vllm_plugin.support import layer_specs
from engines.wire import EngineReport
from kvstore.session import TierName

logger = logging.getLogger("thermocline.vllm")

EVERY_S: Final = 1.0
# The counters that vLLM writes into its log, next to its throughput.
LOGGED: Final = ("restores", "restored_tokens", "saves", "saves_skipped", "loads_failed")
# vLLM has no name for a store on another machine.
SOURCES: Final[dict[TierName | None, CacheHitSource]] = {
    "ram": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
}
TIER_GAUGES: Final = {
    "nbytes": ("bytes", "Bytes of packed sessions held."),
    "capacity_bytes": ("capacity_bytes", "Bytes that may be held."),
    "num_blobs": ("blobs", "Blobs held."),
    "evictions": ("evictions", "Blobs evicted."),
    "errors": ("errors", "Failed operations."),
    "available": ("available", "1 while the tier answers."),
}


def source_of(tier: TierName | None) -> CacheHitSource:
    """Return vLLM's name for the tier that the tokens came from."""
    return SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


class ColdStats(KVConnectorStats):
    """The form in which vLLM carries an ``EngineReport``: ``data`` holds it as builtins.

    Its counters are totals since the start, so the newest report replaces older ones.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return self if other.is_empty() else other

    def reduce(self) -> dict[str, int | float]:
        counters = self.data.get("counters", {})
        return {name: counters[name] for name in LOGGED if name in counters}

    def is_empty(self) -> bool:
        return not self.data


class StatsFeed:
    """Fetches the report periodically, and passes it to vLLM. ``take`` runs on vLLM's thread."""

    def __init__(
        self,
        report: Callable[[], Awaitable[EngineReport]],
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``spawn`` runs a coroutine function on another thread."""
        self._report = report
        self._spawn = spawn
        self._monotonic = monotonic
        self._asked_at = float("-inf")
        self._newest: ColdStats | None = None
        self._warned = False

    def take(self) -> ColdStats | None:
        """Return the report that has arrived since the last call, if any; request the next one."""
        now = self._monotonic()
        if now - self._asked_at >= EVERY_S:
            self._asked_at = now
            self._spawn(self._refresh)
        stats, self._newest = self._newest, None
        return stats

    async def _refresh(self) -> None:
        try:
            report = await self._report()
        except (ConnectionError, TimeoutError) as error:  # a worker is missing; it may come back
            if not self._warned:
                logger.warning("vLLM's metrics are out of date: %s", error or type(error).__name__)
            self._warned = True
            return
        self._warned = False
        self._newest = ColdStats(data=msgspec.to_builtins(report))


class ColdMetrics(KVConnectorPromMetrics):
    """The report as Prometheus metrics named ``vllm:thermocline_*``, in vLLM's API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._events = counter(
            name="vllm:thermocline_events",
            documentation="What the plug-in counts: saves, restores, misses and the like.",
            labelnames=[*labelnames, "event"],
        )
        self._tiers = {
            field: gauge(
                name=f"vllm:thermocline_tier_{name}",
                documentation=words,
                labelnames=[*labelnames, "tier"],
                multiprocess_mode="mostrecent",
            )
            for field, (name, words) in TIER_GAUGES.items()
        }
        self._counted: dict[tuple[int, str], int] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Set the metrics to the values of a report, which has the form of ``ColdStats.data``."""
        labels = self.per_engine_labelvalues[engine_idx]
        for event, total in transfer_stats_data["counters"].items():
            before = self._counted.get((engine_idx, event), 0)
            self._events.labels(*labels, event).inc(max(0, total - before))
            self._counted[engine_idx, event] = total
        for tier in transfer_stats_data["tiers"]:
            for field, gauge in self._tiers.items():
                gauge.labels(*labels, tier["name"]).set(tier[field])


def external_hash(block_hash: bytes) -> ExternalBlockHash:
    """Return the hash as events carry it: bytes, or an integer if vLLM is configured so."""
    return maybe_convert_block_hash(BlockHash(block_hash))


class KVEvents:
    """Makes the KV events of one engine; used on vLLM's thread only."""

    def __init__(
        self, inventory: Inventory, block_tokens: int, groups: Groups, kv_cache_config: Any
    ) -> None:
        self._inventory = inventory
        self._block_tokens = block_tokens
        self._group = groups.full
        spec = layer_specs(kv_cache_config.kv_cache_groups[groups.full].kv_cache_spec)[0]
        self._kind = str(get_kv_cache_spec_kind(spec).value)

    def take(self) -> list[KVCacheEvent]:
        """Return the next events; [] if nothing has changed."""
        return [self._event(x) for x in self._inventory.take()]

    def _event(self, change: Change) -> KVCacheEvent:
        hashes = [external_hash(x) for x in change.hashes]
        if isinstance(change, BlocksRemoved):
            return BlockRemoved(block_hashes=hashes, medium=change.medium, group_idx=self._group)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if change.parent is None else external_hash(change.parent),
            token_ids=list(change.ids),
            block_size=self._block_tokens,
            lora_id=None,
            medium=change.medium,
            lora_name=None,
            group_idx=self._group,
            kv_cache_spec_kind=self._kind,
        )
