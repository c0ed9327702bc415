"""Requests that begin alike at the same time compute their beginning once."""

from __future__ import annotations

import random
import time

import pytest

from tests.vllm.rig.engine import BLOCK, Result
from tests.vllm.rig.tiny_model import VOCAB

pytestmark = pytest.mark.vllm

NUM_SHARED = 24 * BLOCK  # a block more for each request: all fit into the pool
NUM_OWN = 20
ANSWER = 8
NUM_REQUESTS = 8
MOST_COMPUTED = NUM_SHARED + NUM_REQUESTS * (NUM_OWN + BLOCK)


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    """With a beginning that no other test has."""
    generator = random.Random(request.node.name)
    shared = [generator.randrange(10, VOCAB) for _ in range(NUM_SHARED)]
    return [
        shared + [generator.randrange(10, VOCAB) for _ in range(NUM_OWN)]
        for _ in range(NUM_REQUESTS)
    ]


def num_computed(results: list[Result]) -> int:
    return sum(NUM_SHARED + NUM_OWN - x.cached for x in results)


def test_eight_at_once_compute_it_once(engine, prompts):
    before = engine.counters()
    together = engine.ask_all([(x, f"at-once{i}") for i, x in enumerate(prompts)], tokens=ANSWER)
    after = engine.counters()
    assert num_computed(together) <= MOST_COMPUTED
    counted = [after[x] - before.get(x, 0) for x in ("prompt_tokens", "cached_tokens")]
    assert counted[0] - counted[1] == num_computed(together)
    undisturbed = [engine.ask(x, tokens=ANSWER, skip_reading_prefix_cache=True) for x in prompts]
    assert [x.tokens for x in together] == [x.tokens for x in undisturbed]
    assert not any(x.cached for x in undisturbed)


def test_those_that_come_while_it_is_computed_compute_only_their_own(engine, prompts):
    first = engine.begin(prompts[0], "first", tokens=ANSWER)
    deadline = time.monotonic() + 60
    while not any(x.prefilled_tokens for x in engine.report().requests):
        assert time.monotonic() < deadline
    others = [engine.begin(x, f"other{i}", tokens=ANSWER) for i, x in enumerate(prompts[1:])]
    results = engine.finish([first, *others])
    assert num_computed(results) <= MOST_COMPUTED
    again = engine.ask_all([(x, "") for x in prompts], tokens=ANSWER)
    assert [x.tokens for x in again] == [x.tokens for x in results]
