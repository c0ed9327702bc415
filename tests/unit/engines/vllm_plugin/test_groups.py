"""Groups of layers that do not keep all tokens, from the side of vLLM's scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from engines.vllm_plugin.groups import IN_USE, Groups, StateGroup
from engines.vllm_plugin.hot import HotSessions
from engines.vllm_plugin.lookup import Lookup
from kvstore.stats import Counters
from tests.block_sessions import BLOCK
from tests.unit.engines.vllm_plugin.scheduler_bench import PROMPT, Asked, Block, Pool, Request

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


class Bench:
    def __init__(self) -> None:
        self.pool, self.ranks, hot = GroupPool(), Asked(), HotSessions()
        hot.bind(self.pool, GROUPS)
        self.hot = hot
        self.lookup = Lookup(
            self.ranks,
            hot,
            block_tokens=BLOCK,
            groups=GROUPS,
            num_ranks=1,
            deadline_s=5.0,
            max_staged_bytes=1000,
            on_admitted=lambda mark, cache: None,
            on_turn_end=lambda session: None,
            counters=Counters(),
        )

    def load(self, request: Request, hit: int, end: int, tables: list[list[int]]) -> Any:
        self.lookup.add(request)
        self.lookup.match(request, hit * BLOCK)
        self.ranks.answer(end)
        offered, _ = self.lookup.match(request, hit * BLOCK)
        self.lookup.allocated(request, tables, offered or 0)
        return self.lookup.take_step([]).loads[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(("boundary", "blocks"), [(10, [7, 8, 9]), (2, [0, 1]), (0, [])])
def test_what_a_boundary_reaches_back_to(boundary, blocks):
    assert list(WINDOW.reach(boundary)) == blocks


def test_a_load_fills_the_state_too(bench):
    load = bench.load(Request(PROMPT), 0, 10, TABLES)
    assert (load.block_ids, load.state_ids) == (TABLES[1], [59, 77, 78, 79])


def test_what_others_may_be_reading_is_left_alone(bench):
    load = bench.load(Request(PROMPT), 8, 10, TABLES)
    assert (load.first_block, load.block_ids) == (8, TABLES[1][8:])
    assert load.state_ids == [59, IN_USE, 78, 79]


def test_a_failed_request_gets_no_second_offer(bench):
    request = Request(PROMPT)
    bench.load(request, 0, 10, TABLES)
    bench.lookup.absorb(set(), [request.request_id], {}, {request.request_id})
    assert bench.lookup.match(request, 0) == (0, False)


def ended(bench: Bench, tables: list[list[int]], prompt_tokens: int) -> Any:
    request = Request(PROMPT, num_computed_tokens=42, num_prompt_tokens=prompt_tokens)
    bench.lookup.add(request)
    bench.pool.hold(request.block_hashes, tables)
    bench.lookup.finished(request, tables)
    return bench.lookup.take_step([]).saves[0]


def test_the_newest_state_is_saved_and_the_last_before_the_answer(bench):
    tables = [[0, 0, 0, 0, 54, 0, 0, 0, 58, 59], TABLES[1], list(range(70, 80))]
    save = ended(bench, tables, 24)
    assert save.states == {10: [59, 77, 78, 79], 5: [54, 72, 73, 74]}
    held = [*TABLES[1], 59, 77, 78, 79, 54, 72, 73, 74]
    assert sorted(save.held_ids) == sorted(held)
    assert {x.block_id for x in bench.pool.blocks if x.ref_cnt == 1} == set(held)
    bench.lookup.absorb(set(), [], {save.job: 1})
    assert not any(x.ref_cnt for x in bench.pool.blocks)


def test_an_older_state_is_better_than_none(bench):
    save = ended(bench, [[0] * 6 + [56], TABLES[1], list(range(70, 80))], 42)
    assert save.states == {7: [56, 74, 75, 76]}


def test_without_a_state_the_blocks_are_saved(bench):
    save = ended(bench, [[], TABLES[1], list(range(70, 80))], 42)
    assert (save.states, save.block_ids) == ({}, TABLES[1])


def test_dropping_a_session_drops_its_states(bench):
    ended(bench, TABLES, 42)
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
    ended(bench, TABLES, 42)
    assert bench.hot.num_resident(("t", "s")) == 10
    del bench.pool.found[group, Request(PROMPT).block_hashes[block]]
    assert bench.hot.num_resident(("t", "s")) == 0
    assert bench.hot.take_cooled() == [("t", "s")]


def test_a_session_is_as_hot_as_its_newest_state(bench):
    ended(bench, [[0] * 6 + [56], TABLES[1], list(range(70, 80))], 42)
    assert bench.hot.num_resident(("t", "s")) == 7
    del bench.pool.found[1, Request(PROMPT).block_hashes[9]]  # vLLM goes on from before it
    assert bench.hot.num_resident(("t", "s")) == 7


def test_without_a_state_no_session_is_hot(bench):
    ended(bench, [[], TABLES[1], list(range(70, 80))], 42)
    assert bench.hot.num_resident(("t", "s")) == 0


def test_a_state_is_given_back_after_the_tail_that_it_does_not_need(bench):
    tables = [[0, 0, 0, 0, 54, 0, 0, 0, 58, 59], TABLES[1], list(range(70, 80))]
    save = ended(bench, tables, 24)
    bench.lookup.absorb(set(), [], {save.job: 1})
    newest, before = [79, 78, 77, 59], [74, 73, 72, 54]
    tail, head = [29, 28, 27, 26, 25], [24, 23, 22, 21, 20]
    assert bench.pool.freed == [*newest, *tail, *before, *head]
