from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from engines.http import CacheOutcome
from engines.mlx_worker.batch.prefill import (
    ChunkSizer,
    Prefiller,
    state_positions,
)
from engines.mlx_worker.batch.prefix_reuse import PrefillFollowers
from engines.mlx_worker.batch.request import PrefillTask, Request
from engines.mlx_worker.generation import EventQueue, Generation, SequenceSampling
from kvstore.session import SessionRef

pytestmark = pytest.mark.mlx


def task(num_tokens: int, num_cached: int = 0, boundaries: tuple[int, ...] = ()) -> PrefillTask:
    generation = Generation([1] * num_tokens, [SequenceSampling()], 5, [], boundaries=boundaries)
    request = Request(generation, EventQueue(1, lambda index: None))
    return PrefillTask(request, [], np.ones(num_tokens, np.int32), num_cached=num_cached)


def test_chunks_follow_the_speed_of_the_machine() -> None:
    chunks = ChunkSizer(512)
    assert (chunks.chunk(busy=True), chunks.chunk(busy=False)) == (32, 128)  # nothing known yet
    for _ in range(60):
        chunks.took(100, 100 / 300)
    assert (chunks.chunk(busy=True), chunks.chunk(busy=False)) == (64, 256)
    chunks.took(3, 60.0)  # a tiny chunk says nothing
    assert chunks.chunk(busy=False) == 256
    for _ in range(60):
        chunks.took(100, 0.001)
    assert (chunks.chunk(busy=True), chunks.chunk(busy=False)) == (512, 512)
    for _ in range(60):  # a slow machine is not given ever smaller ones
        chunks.took(128, 30.0)
    assert (chunks.chunk(busy=True), chunks.chunk(busy=False)) == (32, 128)
    assert ChunkSizer(16).chunk(busy=False) == 16  # the setting is a limit


def test_prompts_take_turns() -> None:
    prefiller = Prefiller(lambda tokens, cache: None, 512, 0)
    assert prefiller.next() is None
    old, short, fed = task(5000), task(100), task(900, num_cached=899)
    for x in (old, short, fed):
        x.caches = [KVCache()]
        prefiller.admit(x)
        assert len(prefiller.ready) == len(prefiller.admitted) - 1  # its prefix is looked for
        prefiller.start(x)
    assert [prefiller.next() for _ in range(4)] == [old, short, old, short]
    prefiller.remove(short)
    assert [prefiller.next() for _ in range(2)] == [old, old]
    assert len(prefiller.ready) == 2 and list(prefiller.admitted) == [old, fed]


def test_a_chunk_may_take_as_long_as_a_slow_step_does() -> None:
    chunks = ChunkSizer(512)
    chunks.took(64, 0.64)
    assert chunks.chunk(busy=True) == 32
    assert chunks.chunk(busy=True, step_s=0.7) == 64
    assert chunks.chunk(busy=True, step_s=9.0) == 64  # within a second at most


STATES = [
    ((1000, 0, (300, 950)), [288, 928]),
    ((1000, 288, (300, 950)), [928]),
    ((1000, 928, (300, 950)), []),
    ((1000, 0, (950,)), [928]),
    ((1000, 0, (900, 910)), [896]),  # one chunk's end for both
    ((30, 0, (10,)), []),  # shorter than a chunk
    ((97, 0, (97,)), [96]),
    *(((x, 0, ()), [y]) for x, y in ((1000, 992), (97, 96), (96, 64))),  # of a prompt as a whole
]


@pytest.mark.parametrize(("prompt", "positions"), STATES)
def test_states_are_taken_in_the_system_prompt_and_before_the_answer(prompt, positions) -> None:
    assert state_positions(task(*prompt), 32) == positions


@pytest.mark.parametrize("boundaries", [(), (40, 95)])
def test_a_sequence_that_goes_on_half_way_takes_none_inside_its_answer(boundaries) -> None:
    one = task(100, 0, boundaries)
    one.tokens = np.ones(150, np.int32)
    assert state_positions(one, 32)[-1] == (64 if boundaries else 96)
    one.num_cached = 120
    assert state_positions(one, 32) == []


def test_a_prompt_stops_at_each_state_and_at_its_end() -> None:
    one = task(100)
    one.state_positions = [32, 64, 99]
    stops = []
    while one.num_cached < one.target:
        one.num_cached = one.next_stop
        stops.append(one.num_cached)
    assert stops == [32, 64, 99]


@pytest.mark.parametrize("shared, own, followed", [(80, 40, 0), (158, 100, 0), (80, 0, 64)])
def test_of_restored_kv_whole_chunks_are_waited_for(shared: int, own: int, followed: int) -> None:
    """Less than a chunk more is computed: to wait for it again and again would never end."""
    leader, task = (_of_a_session(x, shared, cached) for x, cached in (("a", 512), ("b", own)))
    leader.request.note_restored(512)
    given: list[CacheOutcome] = []
    outcome = CacheOutcome("miss", 0, "never-stored")
    assert PrefillFollowers().follow(task, [leader], outcome, given.append) == followed
    assert task.num_cached == max(own, followed)
    assert [x.cached_tokens for x in given] == [followed] * bool(followed)


def _of_a_session(name: str, shared: int, cached: int) -> PrefillTask:
    tokens = [1] * shared + [ord(name)] * 600
    session = SessionRef("t", name, b"s" * 32)
    generation = Generation(tokens, [SequenceSampling()], 5, [], session=session)
    made = PrefillTask(
        Request(generation, EventQueue(1, lambda index: None)), [], np.array(tokens, np.int32)
    )
    made.caches, made.num_cached = [KVCache()], cached
    if cached:
        rows = mx.zeros((1, 1, cached, 8))
        made.caches[0].update_and_fetch(rows, rows)
    return made
