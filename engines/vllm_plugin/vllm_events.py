"""Converts changes of the inventory into vLLM's own events, which its publisher sends to routers.

vLLM's events of blocks on the GPU contain the cache salt of block 0 in clear text. Ours have no
``extra_keys`` and no ``session_id``: the block's hash, which includes the salt, identifies the
block.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.inventory import BlocksRemoved, Change, Inventory
from engines.vllm_plugin.support import layer_specs


class EventPool(Protocol):
    """The member of ``vllm.v1.core.block_pool.BlockPool`` that is read here."""

    kv_event_queue: list[Any]


def external_hash(block_hash: bytes) -> ExternalBlockHash:
    """The hash in the form of events: bytes, or an integer if vLLM is configured for that."""
    return maybe_convert_block_hash(BlockHash(block_hash))


class KVEvents:
    """Makes the events of one engine. On vLLM's thread."""

    def __init__(
        self, inventory: Inventory, block_tokens: int, groups: Groups, kv_cache_config: Any
    ) -> None:
        self._inventory = inventory
        self._block_tokens = block_tokens
        self._group = groups.full
        spec = layer_specs(kv_cache_config.kv_cache_groups[groups.full].kv_cache_spec)[0]
        self._kind = str(get_kv_cache_spec_kind(spec).value)

    def look_for_clear(self, pool: EventPool) -> None:
        """Report all blocks again if vLLM is about to report that it cleared its blocks.

        vLLM reports that when it sleeps or gets other weights, and readers apply it to all media.
        """
        if any(isinstance(x, AllBlocksCleared) for x in pool.kv_event_queue):
            self._inventory.report_again()

    def take(self) -> list[KVCacheEvent]:
        """The next events; [] if there is no news."""
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
