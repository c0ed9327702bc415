"""What travels inside vLLM's own messages (pickled by vLLM between its own processes)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from engines.vllm_plugin.plan import Step


@dataclass
class StepPlan(KVConnectorMetadata):
    step: Step = field(default_factory=Step)


@dataclass
class SaveAcks(KVConnectorWorkerMetadata):
    """How many ranks need a save's blocks no longer, by job; ``skipped``: one did not begin it."""

    ranks: dict[int, int] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SaveAcks:
        assert isinstance(other, SaveAcks)
        for job, count in other.ranks.items():
            self.ranks[job] = self.ranks.get(job, 0) + count
        self.skipped |= other.skipped
        return self
