"""Prompts that begin alike and come together: the beginning is computed once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from engines.config import EngineConfig
from engines.host.work_line import QueueLimit
from engines.mlx_worker.batch.batch_loop import BatchLoop
from engines.mlx_worker.batch.request import Request, split_request
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.generation import EventBuffer, EventQueue, Generation, PromptAdmitted
from engines.mlx_worker.sessions.hot_sessions import HotCache, HotSessions
from kvstore.session import SessionRef
from tests.integration.mlx_owner.harness import GREEDY, engine, read, session, text
from tests.integration.tiny_models import KINDS, UNTRIMMABLE, tiny_model

pytestmark = pytest.mark.mlx

BEGINNING = text(1, 400)
PROMPTS = [BEGINNING + text(2 + i, 20) for i in range(4)]
CHUNK = 64  # of a prefill
A, B, C = session("a"), session("b"), session("c")


@pytest.mark.parametrize("kind", KINDS)
async def test_prompts_with_one_new_beginning_compute_it_once(kind: str) -> None:
    async with engine(kind, max_batch=4) as it:
        alone = [await it.turn(x) for x in PROMPTS]
        all_there = threading.Event()
        it.owner.post(lambda: bool(all_there.wait(30)))
        streams = [it.submit(x, session(f"{i}")) for i, x in enumerate(PROMPTS)]
        all_there.set()
        together = await asyncio.gather(*map(read, streams))
    assert [x.tokens for x in together] == [x.tokens for x in alone]
    headers = sorted(x.cache.header() for x in together if x.cache)
    assert headers == [*["hot; tokens=400"] * 3, "miss; tokens=0; reason=disabled"]


@pytest.mark.parametrize("kind", KINDS)
async def test_whoever_waits_gets_what_it_was_promised(kind: str) -> None:
    """A window can be cut back only until it is full, so the leader stops where it must be cut."""
    loop = Loop(kind)
    leader, follower = loop.arrive(PROMPTS[0], A), loop.arrive(PROMPTS[1], B)
    loop.end(follower)
    if leader.sequences:
        loop.end(leader)
    assert loop.num_computed == len(PROMPTS[0]) + len(PROMPTS[1]) - len(BEGINNING)


class Loop:
    """The owner thread's parts, stepped by hand."""

    def __init__(self, kind: str = "llama") -> None:
        loaded = tiny_model(kind)
        self._events = EventBuffer(asyncio.get_running_loop())
        self.batching = BatchLoop(
            loaded.model,
            probe(loaded.model),
            EngineConfig(prefill_step=CHUNK),
            HotCache(HotSessions(time.monotonic), None, lambda *notice: None, lambda: None),
            self._events,
            QueueLimit(99),
        )

    def arrive(self, prompt: Sequence[int], ref: SessionRef) -> Request:
        generation = Generation(list(prompt), GREEDY, 8, (), ref)
        request = Request(generation, EventQueue(1, lambda index: None))
        self.batching.arrive(request, split_request(request, 8, 1))
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.batching.step()

    def end(self, request: Request) -> list[int]:
        """Step until the request is over; returns its answer."""
        (sequence,) = request.sequences
        while request.sequences:
            assert not self.batching.is_idle
            self.steps(1)
        return sequence.emitted

    async def shown(self, request: Request) -> list[str]:
        """What the client of a request that is over was informed of, as headers."""
        self._events.flush()
        events = [x async for x in request.events.events()]
        return [x.cache.header() for x in events if isinstance(x, PromptAdmitted)]

    @property
    def num_computed(self) -> int:
        """Tokens of prompts that had to be computed, of those that began so far."""
        counters = self.batching.counters
        return counters.get("prompt_tokens", 0) - counters.get("cached_tokens", 0)


async def test_who_leaves_takes_nothing_with_it() -> None:
    """The followers go on from what was computed, and one of them leads from then on."""
    loop = Loop()
    expected = loop.end(loop.arrive(PROMPTS[1], session("z", "other")))
    before = loop.num_computed
    leader, one, two = (loop.arrive(x, y) for x, y in zip(PROMPTS, (A, B, C), strict=False))
    loop.steps(3)
    loop.batching.stop(leader, None)
    assert loop.end(one) == expected
    loop.end(two)
    assert await loop.shown(leader) == ["miss; tokens=0; reason=disabled"]
    assert await loop.shown(one) == ["hot; tokens=400", "hot; tokens=192"]
    assert await loop.shown(two) == ["hot; tokens=400"]
    own = len(PROMPTS[0]) + (len(PROMPTS[1]) - 3 * CHUNK) + (len(PROMPTS[2]) - len(BEGINNING))
    assert loop.num_computed - before == own


@pytest.mark.parametrize("kind", UNTRIMMABLE)
async def test_states_are_taken_over_where_the_leader_left(kind: str) -> None:
    loop = Loop(kind)
    expected = loop.end(loop.arrive(PROMPTS[1], session("z", "other")))
    leader, follower = loop.arrive(PROMPTS[0], A), loop.arrive(PROMPTS[1], B)
    loop.steps(2)
    loop.batching.stop(leader, None)
    assert loop.end(follower) == expected


async def test_a_failure_is_not_shared() -> None:
    loop = Loop()
    expected = loop.end(loop.arrive(PROMPTS[1], session("z", "other")))
    leader, follower = loop.arrive(PROMPTS[0], A), loop.arrive(PROMPTS[1], B)
    loop.steps(3)
    before = loop.num_computed
    loop.batching.fail(leader, ValueError("a defect"))
    assert loop.end(follower) == expected
    assert loop.num_computed - before == len(PROMPTS[1])  # nothing of the leader's was believed


async def test_a_follower_that_leaves_is_gone() -> None:
    loop = Loop()
    leader, follower = loop.arrive(PROMPTS[0], A), loop.arrive(PROMPTS[1], B)
    loop.steps(2)
    loop.batching.stop(follower, None)
    assert not follower.sequences
    assert loop.end(leader)
    assert loop.batching.admission.tasks == [] and loop.batching.is_idle


async def test_other_tenants_share_nothing() -> None:
    loop = Loop()
    salted = SessionRef(A.tenant, "b", b"another salt".ljust(32, b"."))
    for ref in (session("b", "stranger"), salted):
        before = loop.num_computed
        mine, theirs = loop.arrive(PROMPTS[0], A), loop.arrive(PROMPTS[1], ref)
        loop.steps(3)
        assert loop.num_computed - before == len(PROMPTS[0]) + len(PROMPTS[1])
        for request in (mine, theirs):
            loop.batching.stop(request, None)
        loop.batching.forget(A.name)


async def test_short_beginnings_and_those_that_are_held_are_not_waited_for() -> None:
    loop = Loop()
    leader, short = loop.arrive(PROMPTS[0], A), loop.arrive(BEGINNING[:31] + text(9, 80), B)
    loop.steps(1)
    assert len(loop.batching.prefiller.ready) == 2
    for request in (leader, short):
        loop.batching.stop(request, None)
    held = loop.end(loop.arrive(BEGINNING[:300], C))
    assert held
    first, own = loop.arrive(PROMPTS[0], session("d", "other")), loop.arrive(PROMPTS[1], C)
    loop.steps(1)
    assert len(loop.batching.prefiller.ready) == 2
    assert own.num_fed > first.num_fed
