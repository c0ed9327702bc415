"""The answers that vLLM's scheduler gets for requests that measure."""

from __future__ import annotations

from typing import Any

import pytest

from engines.vllm_plugin.identity import TICKET_FIELD
from engines.vllm_plugin.messages import Forward
from tests.block_sessions import BLOCK
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import (
    PROMPT,
    Bench,
    Request,
    new_bench,
)

TICKET = "a secret"
TABLE = [*range(10, 21)]


@pytest.fixture
def bench() -> Bench:
    return new_bench(num_ranks=2)


def measuring(bench: Bench, ticket: str = TICKET, **fields: Any) -> Request:
    bench.orders[TICKET] = Forward(0, 7, tuple(PROMPT), "salt", **fields)
    request = bench.add(kv_transfer_params={"thermocline": {TICKET_FIELD: ticket}})
    return request


def test_the_kv_that_is_ready_is_given_a_step_before_the_model_runs(bench):
    request = measuring(bench, given=8 * BLOCK)
    assert bench.tracker.match(request, 0) == (8 * BLOCK, True)
    bench.tracker.allocated(request, [TABLE], 8 * BLOCK)
    (given,) = bench.tracker.take_step([("r1", 8 * BLOCK)], []).given
    assert (given.request_id, given.number, given.block_ids) == ("r1", 7, TABLE[:8])
    assert not bench.tracker.take_step([], []).given
    assert not bench.ranks.sent, "no store was asked"


@pytest.mark.parametrize(("first", "blocks"), [(0, TABLE), (5 * BLOCK, TABLE[5:])])
def test_wanted_blocks_are_held_until_every_rank_has_read_them(bench, first, blocks):
    request = measuring(bench, wanted_from=first)
    assert bench.tracker.match(request, 0) == (0, False)
    bench.tracker.finished(request, [TABLE])
    assert bench.tracker.has_work
    (wanted,) = bench.tracker.take_step([], []).wanted
    assert (wanted.number, wanted.block_ids) == (7, blocks)
    assert {bench.pool.blocks[x].ref_cnt for x in blocks} == {1}
    bench.tracker.absorb(set(), [], {wanted.job: 1}, [], [])
    assert bench.tracker.has_work
    bench.tracker.absorb(set(), [], {wanted.job: 1}, [], [])
    assert {bench.pool.blocks[x].ref_cnt for x in blocks} == {0}
    assert not bench.tracker.has_work


def test_a_step_is_seen_if_it_computes_nothing_else(bench):
    measuring(bench, wanted_from=0)
    assert bench.tracker.take_step([], ["r1"]).alone == 7
    assert bench.tracker.take_step([], ["r1", "another's"]).alone == 0
    assert bench.tracker.take_step([], ["another's"]).alone == 0
    assert bench.tracker.take_step([], []).alone == 0


def test_it_is_no_sessions_turn(bench):
    request = measuring(bench, given=BLOCK)
    bench.tracker.take_step([("r1", BLOCK)], [])
    assert (bench.tracker.num_running, bench.tracker.num_waiting) == (0, 0)
    assert bench.tracker.finished(request, [TABLE]) is None
    assert not bench.ended
    assert "prompts" not in bench.counters.as_dict()
    assert not bench.tracker.has_work


def test_an_invented_ticket_is_worth_nothing(bench):
    request = measuring(bench, "a guess", given=8 * BLOCK)
    bench.tracker.match(request, 0)
    assert bench.tracker.num_requests == 1
    assert bench.ranks.sent, "it is an ordinary request, looked up by its content"
