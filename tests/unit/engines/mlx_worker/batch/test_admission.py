"""Who may leave the line for the batch."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from engines.config import EngineConfig
from engines.host.work_line import QueueLimit
from engines.kv_budget import KVCost
from engines.mlx_worker.batch.admission import SAVE_WAIT_S
from engines.mlx_worker.batch.batch_loop import BatchLoop
from engines.mlx_worker.batch.request import Request, split_request
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.generation import EventBuffer, EventQueue, Generation, SequenceSampling
from engines.mlx_worker.sessions.cold_sessions import HotSession
from engines.mlx_worker.sessions.hot_sessions import HotCache, HotSessions
from kvstore.session import SessionRef

pytestmark = pytest.mark.mlx


class Line:
    """An engine's parts with a clock by hand, and requests that arrive in its line."""

    def __init__(self, hot_bytes: int = 1 << 30) -> None:
        self.now_s = 0.0
        self.limit = QueueLimit(10)
        events = EventBuffer(asyncio.get_running_loop())
        plan = CachePlan(("KVCache",), KVCost(8), None)
        hot_cache = HotCache(
            HotSessions(lambda: self.now_s), None, lambda *notice: None, lambda: None
        )
        self.batching = BatchLoop(
            SimpleNamespace(layers=()),
            plan,
            EngineConfig(hot_bytes=hot_bytes),
            hot_cache,
            events,
            self.limit,
            lambda: self.now_s,
        )

    def arrive(self, num_answers: int = 1) -> Request:
        generation = Generation([1, 2, 3], [SequenceSampling()] * num_answers, 5, [])
        request = Request(generation, EventQueue(num_answers, lambda index: None))
        self.limit.enter()
        self.batching.arrive(request, split_request(request, 5, at_once=1))
        return request

    def begin_save(self, name: str, nbytes: int) -> None:
        """Make a session hot whose save does not end."""
        hot = HotSession(SessionRef("tenant", name, b""), [], 3)
        hot.nbytes, hot.saved = nbytes, Future()
        self.batching.hot_cache.sessions.put(hot)

    @property
    def hot(self) -> list[str]:
        return [x.ref.id for x in self.batching.hot_cache.sessions.all()]


async def test_a_task_whose_request_has_failed_is_not_let_in() -> None:
    line = Line()
    request = line.arrive(num_answers=2)
    line.batching.fail(request, ValueError("a guard's fault"))  # through the sibling
    line.batching.admission.admit()
    assert line.batching.admission.tasks == [] and line.limit.num_waiting == 0


async def test_the_next_prompt_waits_for_saves_as_long_as_the_one_that_left() -> None:
    line = Line(hot_bytes=1 << 20)
    line.begin_save("one", 1 << 20)
    gone = line.arrive()
    line.batching.admission.admit()
    line.now_s = SAVE_WAIT_S + 1
    line.batching.stop(gone, None)
    line.arrive()
    line.batching.admission.admit()
    assert line.hot == ["one"]
    line.now_s += SAVE_WAIT_S
    line.batching.admission.admit()
    assert line.hot == ["one"]
    line.now_s += 1
    line.batching.admission.admit()
    assert line.hot == []


async def test_a_prompt_that_leaves_from_the_midst_of_the_line_changes_nothing() -> None:
    line = Line(hot_bytes=1 << 20)
    line.begin_save("one", 1 << 20)
    _, gone = line.arrive(), line.arrive()
    line.batching.admission.admit()
    line.now_s = SAVE_WAIT_S + 1
    line.batching.stop(gone, None)
    line.batching.admission.admit()
    assert line.hot == []
