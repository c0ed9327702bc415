"""Requests that begin alike at the same time compute their beginning once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from engines.vllm_plugin.process.command import SCHEDULER
from kvstore.config import StoreConfig
from tests.vllm.rig.engine import BLOCK, RealEngine, Result
from tests.vllm.rig.tiny_model import VOCAB, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_SHARED = 2048
NUM_OWN = 20
NUM_REQUESTS = 8
MOST_COMPUTED = 1.1 * (NUM_SHARED + NUM_OWN)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """Of a step's 256 tokens a prompt gets 64 while others wait: four could run side by side."""
    engine = RealEngine(
        str(write_tiny_model(tmp_path_factory.mktemp("model"))),
        tmp_path_factory.mktemp("vllm"),
        StoreConfig(codec="raw", ram_bytes=1 << 30),
        skip_tokenizer_init=True,
        max_model_len=NUM_SHARED + 10 * BLOCK,
        num_gpu_blocks_override=4 * NUM_SHARED // BLOCK,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=64,
        scheduler_cls=SCHEDULER,
    )
    yield engine
    engine.close()


@pytest.fixture
def prompts(engine: RealEngine, request: pytest.FixtureRequest) -> list[list[int]]:
    """With a beginning that no other test has."""
    assert engine.forget_local()
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
    together = engine.ask_all([(x, f"at-once{i}") for i, x in enumerate(prompts)])
    after = engine.counters()
    assert num_computed(together) <= MOST_COMPUTED
    counted = [after[x] - before.get(x, 0) for x in ("prompt_tokens", "cached_tokens")]
    assert counted[0] - counted[1] == num_computed(together)
    undisturbed = [engine.ask(x, skip_reading_prefix_cache=True) for x in prompts]
    assert [x.tokens for x in together] == [x.tokens for x in undisturbed]
    assert not any(x.cached for x in undisturbed)


def test_those_that_come_while_it_is_computed_compute_only_their_own(engine, prompts):
    first = engine.begin(prompts[0], "first")
    deadline = time.monotonic() + 60
    while not any(x.prefilled_tokens for x in engine.report().requests):
        assert time.monotonic() < deadline
    others = [engine.begin(x, f"other{i}") for i, x in enumerate(prompts[1:])]
    results = engine.finish([first, *others])
    assert num_computed(results) <= MOST_COMPUTED
    again = engine.ask_all([(x, "") for x in prompts])
    assert [x.tokens for x in again] == [x.tokens for x in results]


def test_another_salt_computes_its_own(engine, prompts):
    names = [engine.begin(prompts[0], salt=x) for x in ("one", "two")]
    assert num_computed(engine.finish(names)) == 2 * len(prompts[0])


def test_an_abort_of_the_one_that_computes_stops_nobody(engine, prompts):
    names = [engine.begin(x, f"left{i}") for i, x in enumerate(prompts)]
    engine.engine.abort_request(names[:1])
    left = engine.finish(names)[1:]
    assert num_computed(left) <= MOST_COMPUTED
    again = engine.ask_all([(x, "") for x in prompts[1:]])
    assert [x.tokens for x in again] == [x.tokens for x in left]
