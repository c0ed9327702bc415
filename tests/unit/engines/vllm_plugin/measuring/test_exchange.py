"""The data that the measuring thread and vLLM's own thread leave for each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engines.vllm_plugin.measuring.exchange import Exchange
from engines.vllm_plugin.plan import Given, StepWork, WantedBlocks
from kvstore.shapes import KVPair, KVRun


class Cache:
    """A paged cache of one layer whose blocks hold one number each."""

    def __init__(self) -> None:
        self.blocks: dict[int, float] = {3: 3.0, 4: 4.0}

    def read(self, block_ids: Sequence[int]) -> list[KVPair]:
        row = np.array([[[self.blocks[x]] for x in block_ids]], np.float32)
        return [(row, row)]

    def write(self, block_ids: Sequence[int], run: KVRun, first_block: int) -> None:
        for block, value in zip(block_ids, run[0][0][0, first_block:, 0], strict=True):
            self.blocks[block] = float(value)


RUN: KVRun = [(np.array([[[8.0], [9.0]]], np.float32),) * 2]


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def exchange(cache: Cache) -> Exchange:
    exchange = Exchange()
    exchange.bind(cache)  # type: ignore[arg-type]
    return exchange


def test_blocks_get_the_given_rows(exchange, cache):
    exchange.open(1, RUN, num_rows=1)
    exchange.fill([Given("r", 1, [4, 3])])
    assert cache.blocks == {4: 8.0, 3: 9.0}
    exchange.note_rows(np.zeros((1, 5), np.float32))
    assert exchange.scores().shape == (1, 5)


def test_scores_after_other_kv_are_none(exchange, cache):
    exchange.open(2, RUN)
    # Of an order that was given up.
    exchange.fill([Given("r", 1, [4, 3])])
    assert cache.blocks == {3: 3.0, 4: 4.0}
    exchange.note_rows(np.zeros((1, 5), np.float32))
    with pytest.raises(RuntimeError, match="did not use"):
        exchange.scores()


class Views:
    """Counts how often it was armed and disarmed."""

    def __init__(self) -> None:
        self.armed = self.disarmed = 0

    def arm(self) -> None:
        self.armed += 1

    def disarm(self) -> None:
        self.disarmed += 1


def test_layers_are_seen_in_the_orders_own_step_alone(exchange):
    views = Views()
    exchange.begin_step(StepWork())
    exchange.watch(views)  # type: ignore[arg-type]
    exchange.open(5)
    for other in (0, 4):
        exchange.begin_step(StepWork(alone=other))
        assert views.armed == 0, "other requests compute there"
    exchange.begin_step(StepWork(alone=5))
    exchange.read([])
    assert (views.armed, views.disarmed) == (1, 1)
    exchange.watch(None)
    exchange.begin_step(StepWork(alone=5))
    assert views.armed == 1


def test_it_is_known_whether_an_order_had_its_step_alone(exchange):
    exchange.open(5)
    exchange.begin_step(StepWork())  # with others
    assert not exchange.was_alone
    exchange.begin_step(StepWork(alone=5))
    exchange.begin_step(StepWork())  # of others, until its blocks are read
    assert exchange.was_alone
    exchange.open(6)
    assert not exchange.was_alone
    exchange.begin_step(StepWork(alone=5))
    assert not exchange.was_alone


def test_the_blocks_that_the_order_wants_are_read(exchange):
    exchange.open(2)
    exchange.read([WantedBlocks(10, 1, [3]), WantedBlocks(11, 2, [4])])
    assert exchange.found(0.0).rows[0][0].ravel() == [4.0]
    with pytest.raises(TimeoutError):
        exchange.found(0.0)


def test_a_failure_ends_the_measurement_and_nothing_else(exchange, cache):
    cache.blocks = None
    exchange.open(1, RUN)
    exchange.fill([Given("r", 1, [4, 3])])
    exchange.read([WantedBlocks(10, 1, [3])])
    with pytest.raises(TimeoutError):
        exchange.found(0.0)
    with pytest.raises(RuntimeError, match="did not use"):
        exchange.scores()


def test_only_the_logits_of_the_prompt_itself_are_noted(exchange):
    exchange.open(4, num_rows=3)
    assert not exchange.wants_rows(), "others' logits before the request is in a step"
    for row in (np.zeros((2, 5), np.float32), np.ones((1, 5), np.float32)):  # prefilled in two
        exchange.expect_rows(4)
        assert exchange.wants_rows()
        exchange.note_rows(row)
        assert not exchange.wants_rows(), "the logits to sample from in the next step"
    exchange.expect_rows(4)
    assert not exchange.wants_rows(), "all have come"
    assert exchange.scores()[:, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("num_rows", [0, 2, 4])
def test_scores_of_too_many_or_too_few_tokens_are_none(exchange, num_rows):
    exchange.open(5, num_rows=3)
    exchange.expect_rows(4)  # an order that was given up
    assert not exchange.wants_rows()
    exchange.expect_rows(5)
    if num_rows:
        exchange.note_rows(np.zeros((num_rows, 5), np.float32))
    with pytest.raises(RuntimeError, match="some scores of a measurement are missing"):
        exchange.scores()
