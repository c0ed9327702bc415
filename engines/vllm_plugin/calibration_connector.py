"""The connector of a calibration: requests that begin behind a past of somebody's choice.

One request at a time says how many of its first tokens it will not compute. Its blocks are filled,
right before the forward pass, with what the instrument holds ready in the worker's half; and which
blocks it had is told in its last output. vLLM runs in one process then, so the instrument finds
that half by ``get_kv_transfer_group``.

Nothing here is waited for, so that loads are part of the step: with one request, and no load that
could fail, what speaks against them in serving does not apply.
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

from engines.vllm_plugin.paging import PagedCache
from engines.vllm_plugin.support import check, check_version
from engines.vllm_plugin.worker import attention_cache
from kvstore.shapes import KVPair

RESTORED: Final = "restored_tokens"  # in a request's kv_transfer_params
BLOCKS: Final = "block_ids"  # in those of its answer


@dataclass
class Filling(KVConnectorMetadata):
    """Which blocks are to be filled in this step; most steps have none."""

    block_ids: Sequence[int] = ()


class CalibrationConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises ``Unsupported`` at start for what cold sessions are not possible with."""

    pages: PagedCache  # of the worker's half

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        self.groups = check(vllm_config, kv_cache_config)
        # Of the worker's half: what the next request is to begin with, in whole blocks.
        self.past: Sequence[KVPair] = ()
        self._to_fill: Sequence[int] = ()

    # ---- beside the scheduler

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
        filling, self._to_fill = Filling(self._to_fill), ()
        return filling

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, {BLOCKS: list(block_ids[self.groups.full])}

    # ---- in the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.pages = attention_cache(self._vllm_config, kv_caches, self.groups.layers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        filling = self._get_connector_metadata()
        assert isinstance(filling, Filling)
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
