"""Who may leave the line for the batch."""

from __future__ import annotations

import asyncio

import pytest

from engines.config import EngineConfig
from engines.host.work_line import QueueLimit
from engines.kv_budget import KVCost
from engines.mlx_worker.batch.batch_loop import ThreadContext, assemble
from engines.mlx_worker.batch.request import Request, split_request
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.generation import EventBuffer, EventQueue, Generation, SequenceSampling

pytestmark = pytest.mark.mlx


async def test_a_task_whose_request_has_failed_is_not_let_in() -> None:
    limit = QueueLimit(10)
    events = EventBuffer(asyncio.get_running_loop())
    thread = ThreadContext(events, limit, lambda work: None, lambda *notice: None, lambda: 0.0)
    plan = CachePlan(("KVCache",), KVCost(8), None)
    parts = assemble(lambda tokens, cache: None, plan, None, EngineConfig(), thread)
    generation = Generation([1, 2, 3], [SequenceSampling()] * 2, 5, [])
    request = Request(generation, EventQueue(2, lambda index: None))
    limit.enter()
    parts.loop.arrive(request, split_request(request, 5, at_once=1))
    parts.loop.fail(request, ValueError("a guard's fault"))  # through the sibling
    parts.admission.admit()
    assert parts.admission.tasks == [] and limit.num_waiting == 0
