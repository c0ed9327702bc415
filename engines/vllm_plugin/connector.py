"""The class that vLLM loads: forwards vLLM's calls to the plug-in's two sides.

    --kv-transfer-config '{"kv_connector": "ThermoclineConnector",
        "kv_connector_module_path": "engines.vllm_plugin.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"settings": "/path/plugin.json"}}'

vLLM makes one instance in EngineCore, for its scheduler, and one in every worker.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from engines.log_lines import log_as
from engines.vllm_plugin.blocks.block_layout import UnknownLayout
from engines.vllm_plugin.blocks.blocks import Blocks
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.config import BadSettings, settings_from
from engines.vllm_plugin.device.device_check import blocks_for
from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.plan import StepWork
from engines.vllm_plugin.process.processes import die_with_parent
from engines.vllm_plugin.process.server import record_refusal, refusal_folder
from engines.vllm_plugin.reports import ColdMetrics, ColdStats, KVEvents, StatsFeed, source_of
from engines.vllm_plugin.scheduler.scheduler_side import SchedulerSide
from engines.vllm_plugin.support import Unsupported, check, check_version
from engines.vllm_plugin.worker.transfer import Ended
from engines.vllm_plugin.worker.worker_side import WorkerSide, open_worker_side
from kvstore.errors import CodecRefused, TierInUse, UnknownCodec
from kvstore.store.cold_store import ColdStore

logger = logging.getLogger("thermocline.vllm")


@dataclass
class StepPlan(KVConnectorMetadata):
    """A step's work on its way to the workers. vLLM pickles it between its own processes."""

    step: StepWork = field(default_factory=StepWork)


@dataclass
class BlockAcks(KVConnectorWorkerMetadata):
    """The number of ranks that no longer need a save's blocks, by job.

    ``skipped``: the jobs among them that at least one rank did not begin.
    """

    ranks: Counter[int] = field(default_factory=Counter)
    skipped: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BlockAcks:
        """Add the counts of another rank."""
        assert isinstance(other, BlockAcks)
        self.ranks += other.ranks
        self.skipped |= other.skipped
        return self


class ThermoclineConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's interface to cold sessions.

    Raises ``Unsupported`` or ``BadSettings`` with one sentence, at start only.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as("vllm")
        with record_refusal(refusal_folder(), BadSettings):
            self._settings = settings_from(self._kv_transfer_config.kv_connector_extra_config)
        self._folder = Path(self._settings.runtime_dir)
        with record_refusal(self._folder, Unsupported):
            check_version(vllm.__version__)
            self._groups = check(vllm_config, kv_cache_config)
        if self._settings.die_with_parent:
            die_with_parent()
        self._scheduler_side: SchedulerSide | None = None
        self._stats: StatsFeed | None = None
        self._events: KVEvents | None = None  # only if vLLM reports KV events
        self._worker: WorkerSide | None = None
        self._ended = Ended()  # the worker's ended transfers that vLLM does not know of yet
        if role is KVConnectorRole.SCHEDULER:
            given = self._settings, vllm_config, self._groups, vllm.__version__
            with record_refusal(self._folder, OSError, ValueError):  # sockets that cannot be opened
                side = self._scheduler_side = SchedulerSide(*given)
            self._stats = StatsFeed(side.verbs.stats, side.hub.spawn)
            if side.inventory is not None:
                block_tokens = int(vllm_config.cache_config.block_size)
                self._events = KVEvents(side.inventory, block_tokens, self._groups, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped save costs only a later miss

    # ---- in EngineCore: vLLM's scheduler calls

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "a method of the other role"
        return self._scheduler_side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.tracker.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.tracker.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.tracker.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @property
    def num_held_back(self) -> int:
        """The number of requests that wait for a running one: see ``scheduler.vllm_scheduler``."""
        return self._scheduler.tracker.num_held_back

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        if not num_external_tokens:
            return {}
        return {source_of(self._scheduler.tracker.tier_of(request)): num_external_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        new = scheduler_output.scheduled_new_reqs
        admitted = [(x.req_id, x.num_computed_tokens) for x in new]
        scheduled = scheduler_output.num_scheduled_tokens
        return StepPlan(self._scheduler.tracker.take_step(admitted, scheduled))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.tracker.absorb(
            connector_output.invalid_block_ids or set(),
            connector_output.finished_recving or (),
            meta.ranks if isinstance(meta, BlockAcks) else {},
            connector_output.failed_recving,
            meta.skipped if isinstance(meta, BlockAcks) else (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.tracker.finished(request, block_ids)
        return False, None  # vLLM would show it to the client

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.take() if self._events is not None else ()

    def reset_cache(self) -> bool:
        """Refuse to drop the stored sessions; vLLM calls this when weights were replaced."""
        logger.warning("cold sessions are not dropped by a reset of vLLM's caches")
        return False

    def get_kv_connector_stats(self) -> ColdStats | None:
        """Return EngineCore's newest report. Workers return None: they report to EngineCore."""
        return self._stats.take() if self._stats else None

    # ---- in vLLM's HTTP server

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ColdStats:
        return ColdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ColdMetrics:
        return ColdMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        configs = self._settings, self._vllm_config, self._kv_cache_config
        foreseen = (UnknownLayout, CodecRefused, UnknownCodec, TierInUse, ValueError, ImportError)
        with record_refusal(self._folder, *foreseen):
            self._worker = open_worker_side(*configs, kv_caches, self._groups, self._blocks_for)

    def _blocks_for(self, cache: PagedCache, store: ColdStore, spare_bytes: int) -> Blocks:
        """Return the code that packs and fills blocks. Tests override this method."""
        return blocks_for(cache, store, spare_bytes)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # vLLM calls this before the model runs. It calls ``start_load_kv`` that early only if it
        # waits for loads within the step.
        if self._worker is not None:
            EXCHANGE.begin_step(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._step)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._step)

    @property
    def _step(self) -> StepWork:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan.step

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step waits for loads."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: sessions are saved when their turn ends, not layer by layer."""

    # At the end of a step vLLM calls these three, in this order.

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = self._worker.pop_ended() if self._worker is not None else Ended()
        self._ended.loads |= ended.loads
        self._ended.jobs |= ended.jobs
        loads = ended.loads
        # With one group vLLM keeps the blocks before the first bad one. With several groups it
        # accepts no list of bad blocks, so the whole load is reported as failed.
        failed = {x for x, bad in loads.items() if bad} if self._groups.states else set[str]()
        return KVConnectorTransferResults(finished_recving={*loads}, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        loads, self._ended.loads = self._ended.loads, {}
        return set() if self._groups.states else set[int]().union(*loads.values())

    def build_connector_worker_meta(self) -> BlockAcks | None:
        jobs, self._ended.jobs = self._ended.jobs, {}
        return BlockAcks(Counter({*jobs}), {x for x in jobs if jobs[x]}) if jobs else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler_side is not None:
            self._scheduler_side.hub.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False
