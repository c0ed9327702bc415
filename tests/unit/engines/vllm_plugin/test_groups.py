"""Groups of layers that do not keep all tokens, from the side of vLLM's scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from engines.vllm_plugin.groups import IN_USE, Groups, StateGroup
from engines.vllm_plugin.plan import Load
from tests.block_sessions import BLOCK
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import (
    PROMPT,
    Bench,
    Block,
    Pool,
    Request,
    new_bench,
)

RECURRENT = StateGroup(0, ("a",), 1, recurrent=True)
WINDOW = StateGroup(2, ("c",), 3, recurrent=False)
GROUPS = Groups(1, ("b",), (RECURRENT, WINDOW))
# The request's blocks: of the recurrent group two are left, of the window four.
TABLES = [[0] * 8 + [58, 59], list(range(20, 30)), [0] * 6 + [76, 77, 78, 79]]


class GroupPool(Pool):
    """Knows blocks by hash and group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, bytes], Block] = {}

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Block] | None:
        found = [self.found.get((x, block_hash)) for x in groups]
        return None if None in found else [x for x in found if x]

    def hold(self, chain: list[bytes], tables: list[list[int]]) -> None:
        for group, table in enumerate(tables):
            for block_hash, block_id in zip(chain, table, strict=False):
                if block_id:
                    self.found[group, block_hash] = self.blocks[block_id]


def new_group_bench() -> Bench:
    return new_bench(GROUPS, GroupPool(), num_ranks=1)


def planned_load(bench: Bench, request: Request, hit: int) -> Load:
    bench.tracker.add(request)
    bench.tracker.match(request, hit * BLOCK)
    bench.ranks.answer(10)
    offered, _ = bench.tracker.match(request, hit * BLOCK)
    bench.tracker.allocated(request, TABLES, offered or 0)
    return bench.tracker.take_step([], []).loads[0]


@pytest.fixture
def bench() -> Bench:
    return new_group_bench()


@pytest.mark.parametrize(("boundary", "blocks"), [(10, [7, 8, 9]), (2, [0, 1]), (0, [])])
def test_the_blocks_that_a_boundary_reaches_back_to(boundary, blocks):
    assert list(WINDOW.reach(boundary)) == blocks


@pytest.mark.parametrize(("hit", "states"), [(0, [59, 77, 78, 79]), (8, [59, IN_USE, 78, 79])])
def test_a_load_fills_the_state_too_but_no_block_that_others_may_be_reading(bench, hit, states):
    load = planned_load(bench, Request(PROMPT), hit)
    assert (load.first_block, load.block_ids) == (hit, TABLES[1][hit:])
    assert load.state_ids == states


def test_a_failed_request_gets_no_second_offer(bench):
    request = Request(PROMPT)
    planned_load(bench, request, 0)
    bench.tracker.absorb(set(), [request.request_id], {}, {request.request_id}, [])
    assert bench.tracker.match(request, 0) == (0, False)


def ended(bench: Bench, tables: list[list[int]], prompt_tokens: int) -> Any:
    request = bench.add(num_computed_tokens=len(PROMPT), num_prompt_tokens=prompt_tokens)
    bench.pool.hold(request.block_hashes, tables)
    bench.tracker.finished(request, tables)
    return bench.tracker.take_step([], []).saves[0]


def test_the_newest_state_is_saved_and_the_last_before_the_answer(bench):
    tables = [[0, 0, 0, 53, 0, 0, 0, 0, 58, 59], TABLES[1], list(range(70, 80))]
    save = ended(bench, tables, 6 * BLOCK)
    assert save.states == {10: [59, 77, 78, 79], 4: [53, 71, 72, 73]}
    held = [*TABLES[1], 59, 77, 78, 79, 53, 71, 72, 73]
    assert sorted(save.held_ids) == sorted(held)
    assert {x.block_id for x in bench.pool.blocks if x.ref_cnt == 1} == set(held)
    bench.tracker.absorb(set(), [], {save.job: 1}, [], [])
    assert not any(x.ref_cnt for x in bench.pool.blocks)
    newest, before = [79, 78, 77, 59], [73, 72, 71, 53]
    tail, head = [29, 28, 27, 26, 25, 24], [23, 22, 21, 20]
    # A state is given back after the tail that it does not need.
    assert bench.pool.freed == [*newest, *tail, *before, *head]


@pytest.mark.parametrize(
    ("recurrent", "states"), [([0] * 5 + [55, 56], {6: [55, 73, 74, 75]}), ([], {})]
)
def test_of_older_states_the_newest_at_a_chunks_end_is_saved(bench, recurrent, states):
    save = ended(bench, [recurrent, TABLES[1], list(range(70, 80))], len(PROMPT))
    assert (save.states, save.block_ids) == (states, TABLES[1])


def test_dropping_a_session_drops_its_states(bench):
    ended(bench, TABLES, len(PROMPT))
    name = ("t", "s")
    assert bench.hot.num_resident(name) == 10
    for block in bench.pool.blocks:
        block.ref_cnt = 0
    evicted: set[int] = set()
    bench.pool.evict_blocks = evicted.update
    bench.hot.ask_to_drop(name)
    bench.hot.drop_asked()
    assert evicted == {x for table in TABLES for x in table if x}


@pytest.mark.parametrize(("group", "block"), [(0, 9), (2, 7), (2, 9), (1, 9)])
def test_a_session_is_hot_only_while_its_newest_state_is_there(bench, group, block):
    """vLLM frees each group's blocks by themselves, and may reuse a state before the tail."""
    ended(bench, TABLES, len(PROMPT))
    assert bench.hot.num_resident(("t", "s")) == 10
    del bench.pool.found[group, Request(PROMPT).block_hashes[block]]
    assert bench.hot.num_resident(("t", "s")) == 0
    assert bench.hot.pop_cooled() == [("t", "s")]


@pytest.mark.parametrize(("recurrent", "hot"), [([0] * 6 + [56], 7), ([], 0)])
def test_a_session_is_as_hot_as_its_newest_state(bench, recurrent, hot):
    ended(bench, [recurrent, TABLES[1], list(range(70, 80))], len(PROMPT))
    assert bench.hot.num_resident(("t", "s")) == hot
    del bench.pool.found[1, Request(PROMPT).block_hashes[9]]  # vLLM goes on from before it
    assert bench.hot.num_resident(("t", "s")) == hot
