"""The connector of a calibration, which lets a request go on behind KV of the caller's choice.

There is one request at a time. It says for how many of its first tokens KV is given. Right before
the forward pass, its blocks are filled with the KV that the instrument has put into the connector
of the worker side; its last output names its blocks, so that the instrument can read them. vLLM
runs in one process then, so the instrument finds this connector by ``get_kv_transfer_group``.

Loads happen within the step, which then waits for them. In serving that would hold up others and
could fail; here there is one request, and no load that fails.
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

from engines.vllm_plugin.support import check, check_version
from engines.vllm_plugin.worker.paging import PagedCache
from engines.vllm_plugin.worker.worker_side import attention_cache
from kvstore.shapes import KVPair

RESTORED: Final = "restored_tokens"  # in a request's kv_transfer_params
BLOCKS: Final = "block_ids"  # in those of its answer


@dataclass
class BlocksToFill(KVConnectorMetadata):
    """Ids of the blocks to fill in this step; most steps have none."""

    block_ids: Sequence[int] = ()


class CalibrationConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's interface to the instrument.

    Raises ``Unsupported`` at start if cold sessions are not possible with this engine.
    """

    pages: PagedCache  # on the worker side

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        self.groups = check(vllm_config, kv_cache_config)
        # On the worker side: the KV that the next request begins with, in whole blocks.
        self.past: Sequence[KVPair] = ()
        self._to_fill: Sequence[int] = ()

    # ---- on the scheduler side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert num_computed_tokens == 0, "every request has a salt of its own"
        return _asked(request), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            own = blocks.get_block_ids()[self.groups.full]
            block_tokens = self._vllm_config.cache_config.block_size
            self._to_fill = own[: -(-num_external_tokens // block_tokens)]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        filling, self._to_fill = BlocksToFill(self._to_fill), ()
        return filling

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, {BLOCKS: list(block_ids[self.groups.full])}

    # ---- on the worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.pages = attention_cache(self._vllm_config, kv_caches, self.groups.layers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        filling = self._get_connector_metadata()
        assert isinstance(filling, BlocksToFill)
        if filling.block_ids:
            self.pages.write(filling.block_ids, self.past, 0)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded before the first one runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """The instrument reads the blocks when the request is done."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def _asked(request: Any) -> int:
    return int((request.kv_transfer_params or {}).get(RESTORED, 0))
