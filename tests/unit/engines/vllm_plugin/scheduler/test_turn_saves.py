"""The end of a turn: which blocks are saved, and which stay in vLLM's pool."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks
from kvstore.session import SessionRef
from tests.block_sessions import BLOCK, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import PROMPT, Bench, Request


def image(offset: int) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=9))


def test_a_turns_full_blocks_are_held_until_every_rank_has_them(bench):
    request = bench.add(num_computed_tokens=len(PROMPT))
    ids = bench.pool.fill(request.block_hashes)
    bench.tracker.finished(request, [[*ids, 30]])
    save = bench.tracker.take_step([], []).saves[0]
    assert (save.session.id, save.block_ids, len(save.hashes)) == ("s", ids, 10)
    assert {bench.pool.blocks[x].ref_cnt for x in ids} == {1}
    bench.tracker.absorb(set(), [], {save.job: 1}, [], [])
    assert bench.tracker.has_work
    bench.tracker.absorb(set(), [], {save.job: 1}, [], [])
    assert not bench.tracker.has_work
    assert bench.pool.freed == ids[::-1]  # the tail is reused first
    assert bench.ended == [save.session]


def test_tokens_of_a_step_in_flight_do_not_count(bench):
    request = bench.add(num_computed_tokens=10 * BLOCK, num_in_flight_tokens=1)
    bench.tracker.finished(request, [list(range(10))])
    assert len(bench.tracker.take_step([], []).saves[0].hashes) == 8


def test_blocks_after_the_last_full_chunk_stay_hot_and_are_not_saved(bench):
    request = bench.add(tokens_of(9, 2), num_computed_tokens=9 * BLOCK + 2)
    ids = bench.pool.fill(request.block_hashes)
    bench.tracker.finished(request, [[*ids, 30]])
    (save,) = bench.tracker.take_step([], []).saves
    assert (save.block_ids, len(save.hashes)) == (ids[:8], 8)
    assert bench.pool.blocks[ids[8]].ref_cnt == 0
    assert bench.hot.num_resident(("t", "s")) == 9


def test_a_turn_shorter_than_a_chunk_is_not_saved(bench):
    request = bench.add(tokens_of(1, 9), num_computed_tokens=BLOCK + 9)
    bench.tracker.finished(request, [bench.pool.fill(request.block_hashes)])
    assert bench.tracker.is_settled
    assert bench.hot.num_resident(("t", "s")) == 1


def test_a_request_without_a_session_is_not_saved(bench):
    request = bench.add(num_computed_tokens=len(PROMPT), kv_transfer_params=None)
    bench.tracker.finished(request, [list(range(10))])
    assert bench.tracker.is_settled


def test_vllms_own_session_id_will_do(bench):
    fields = {"kv_transfer_params": None, "session_id": "theirs"}
    request = bench.add(num_computed_tokens=len(PROMPT), **fields)
    bench.tracker.finished(request, [list(range(10))])
    assert bench.tracker.take_step([], []).saves[0].session == SessionRef("", "theirs", b"ab")


KEPT = [
    ({}, True),
    ({"prompt_embeds": object()}, False),
    ({"mm_features": [image(8 * BLOCK - 1)]}, False),
    ({"mm_features": [image(8 * BLOCK)]}, True),
]


@pytest.mark.parametrize(("fields", "kept"), KEPT)
def test_ids_are_saved_where_they_say_all_of_the_kv(fields, kept):
    blocks = TokenBlocks(BLOCK, keeps_ids=True)
    found = blocks.computed_ids(Request(PROMPT, **fields), 8)
    assert found == (struct.pack(f"<{8 * BLOCK}I", *PROMPT[: 8 * BLOCK]) if kept else b"")
    assert TokenBlocks(BLOCK).computed_ids(Request(PROMPT), 8) == b""


def ran(bench: Bench, name: str, tokens: list[int]) -> list[int]:
    """One whole turn that left its blocks in vLLM's pool."""
    request = bench.add(tokens, name=name, session=name, num_computed_tokens=len(tokens))
    ids = bench.pool.fill(request.block_hashes)
    bench.tracker.finished(request, [ids])
    for save in bench.tracker.take_step([], []).saves:
        bench.tracker.absorb(set(), [], {save.job: 2}, [], [])
    return ids


def test_demoted_blocks_are_gone_before_the_next_look(bench):
    ran(bench, "a", PROMPT)
    assert bench.hot.num_resident(("t", "a")) == 10
    bench.hot.ask_to_drop(("t", "a"))
    assert bench.hot.num_resident(("t", "a")) == 0
    assert bench.pool.cached  # vLLM's tables change on vLLM's thread only
    bench.add([7] * len(PROMPT), name="other", session="other")
    assert not bench.pool.cached


def test_a_turn_that_came_meanwhile_keeps_its_blocks(bench):
    ran(bench, "a", PROMPT)
    bench.hot.ask_to_drop(("t", "a"))
    with_turn = Request(PROMPT, name="again", session="a")
    bench.hot.begin(SessionRef("t", "a", b""))
    bench.tracker.add(with_turn)
    assert len(bench.pool.cached) == 10


def test_idle_time_and_business_of_sessions(bench):
    bench.now[0] = 100.0
    request = bench.add(num_computed_tokens=len(PROMPT))
    assert bench.hot.is_busy(("t", "s"))
    bench.now[0] = 107.0
    bench.tracker.finished(request, [list(range(10))])
    bench.now[0] = 110.0
    assert not bench.hot.is_busy(("t", "s"))
    assert bench.hot.idle_s(("t", "s")) == 3.0
    assert bench.hot.idle_s(("t", "other")) is None


def test_blocks_that_requests_and_saves_hold_are_not_idle(bench):
    """They are counted as used; counted twice, they would look like pressure."""
    request = bench.add(num_computed_tokens=len(PROMPT))
    ids = bench.pool.fill(request.block_hashes)
    bench.tracker.finished(request, [ids])
    assert (bench.hot.num_used_blocks(), bench.hot.num_idle_blocks()) == (10, 0)
    for save in bench.tracker.take_step([], []).saves:
        bench.tracker.absorb(set(), [], {save.job: 2}, [], [])
    assert (bench.hot.num_used_blocks(), bench.hot.num_idle_blocks()) == (0, 10)
    bench.add(name="again")
    assert bench.hot.num_idle_blocks() == 0
