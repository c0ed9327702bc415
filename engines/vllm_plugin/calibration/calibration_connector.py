"""The connector of a calibration, which lets a request continue from KV of the caller's choice.

There is one request at a time. It says for how many of its first tokens KV is given. Right before
the forward pass, its blocks are filled with the KV that the instrument has put into the connector
of the worker side; its last output names its blocks, so that the instrument can read them. A
calibration runs vLLM in one process, so the instrument finds this connector by
``get_kv_transfer_group``.

Rows are loaded within the step, which waits for them. In serving that would delay other requests,
and a load could fail; here there is one request, and no load fails. A state is loaded a step
earlier, with its rows: vLLM moves recurrent states to the step's own blocks before it requests
loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.blocks.state_layers import StateBlocks
from engines.vllm_plugin.groups import CachedBlocks
from engines.vllm_plugin.support import check, check_version
from engines.vllm_plugin.worker.worker_side import attention_cache, state_blocks
from kvstore.blobs.snapshot import StateTree
from kvstore.shapes import KVPair

RESTORED: Final = "restored_tokens"  # in a request's kv_transfer_params
BLOCKS: Final = "block_ids"  # in those of its answer
# In those of its answer, too: the block ids of the state after the prompt's whole blocks (without
# the last one, if the prompt ends with it); [] where vLLM keeps no state.
STATE: Final = "state_ids"


@dataclass
class BlocksToFill(KVConnectorMetadata):
    """The ids of the blocks to fill in this step; most steps have none.

    ``state_ids``: the blocks of the state after them. ``request_id``: the request that they are
    for.
    """

    block_ids: Sequence[int] = ()
    state_ids: Sequence[int] = ()
    request_id: str = ""


class CalibrationConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's interface to the instrument.

    Raises ``Unsupported`` at start if cold sessions are not possible with this engine.
    """

    # On the worker side. ``states``: for the layers that do not keep all tokens; None if all do.
    pages: PagedCache
    states: StateBlocks | None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        self.groups = check(vllm_config, kv_cache_config)
        self._kv_cache_config = kv_cache_config
        self._block_tokens = int(vllm_config.cache_config.block_size)
        # On the worker side: the KV that the next request begins with, in whole blocks.
        self.past: Sequence[KVPair] = ()
        self.past_state: StateTree = None
        self._loaded: set[str] = set()  # requests that waited for this KV and now have it
        # On the scheduler side.
        self._pool: CachedBlocks
        self._to_fill = BlocksToFill()

    # ---- on the scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert num_computed_tokens == 0, "every request has a salt of its own"
        asked = _asked(request)
        return asked, bool(asked and self.groups.states)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tables = blocks.get_block_ids()
            num_blocks = -(-num_external_tokens // self._block_tokens)
            self._to_fill = BlocksToFill(
                tables[self.groups.full][:num_blocks],
                self.groups.state_blocks(tables, num_blocks, 0),
                request.request_id,
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        filling, self._to_fill = self._to_fill, BlocksToFill()
        return filling

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = {BLOCKS: list(block_ids[self.groups.full])}
        if self.groups.states:
            boundary = (request.num_prompt_tokens - 1) // self._block_tokens
            hashes = request.block_hashes
            held = self.groups.held_states(self._pool, hashes, [boundary] if boundary else [])
            answer[STATE] = held.get(boundary, [])
        return False, answer

    # ---- on the worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        self.pages = attention_cache(config, kv_caches, self.groups.layers)
        self.states = state_blocks(config, self._kv_cache_config, kv_caches, self.groups)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        filling = self._get_connector_metadata()
        assert isinstance(filling, BlocksToFill)
        if not filling.block_ids:
            return
        self.pages.write(filling.block_ids, self.past, 0)
        if self.states is not None:
            self.states.write(len(filling.block_ids), filling.state_ids, self.past_state)
            self._loaded.add(filling.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded, self._loaded = self._loaded, set()
        return None, loaded or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are loaded before the first one runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the instrument reads the blocks when the request is done."""

    def wait_for_save(self) -> None:
        """Do nothing: no session is saved."""


def _asked(request: Any) -> int:
    return int((request.kv_transfer_params or {}).get(RESTORED, 0))
