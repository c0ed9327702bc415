"""The end of a turn: which blocks are saved, at once or later, and which stay in vLLM's pool."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.scheduler import turn_saves
from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks
from kvstore.session import SessionRef
from tests.block_sessions import BLOCK, hashes, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import PROMPT, Bench, Request
from tests.unit.engines.vllm_plugin.test_groups import TABLES, new_group_bench
from tests.unit.engines.vllm_plugin.test_groups import ended as group_turn

OTHER = tokens_of(10, 2, 2000)


def test_a_turns_full_blocks_are_held_until_every_rank_has_them(bench):
    (save,) = bench.end_turn()
    ids = save.block_ids
    assert (save.session.id, ids, len(save.hashes)) == ("s", [*range(10, 20)], 10)
    assert {bench.pool.blocks[x].ref_cnt for x in ids} == {1}
    bench.acknowledge(save, 1)
    assert bench.tracker.has_work
    bench.acknowledge(save, 1)
    assert not bench.tracker.has_work
    assert bench.pool.freed == ids[::-1]  # the tail is reused first
    assert bench.ended == [save.session]


def test_tokens_of_a_step_in_flight_do_not_count(bench):
    (save,) = bench.end_turn(num_computed_tokens=10 * BLOCK, num_in_flight_tokens=1)
    assert len(save.hashes) == 8


def test_blocks_after_the_last_full_chunk_stay_hot_and_are_not_saved(bench):
    (save,) = bench.end_turn(tokens_of(9, 2))
    assert (save.block_ids, len(save.hashes)) == ([*range(10, 18)], 8)
    assert bench.pool.blocks[18].ref_cnt == 0
    assert bench.hot.num_resident(("t", "s")) == 9


def test_a_turn_shorter_than_a_chunk_is_not_saved(bench):
    assert bench.end_turn(tokens_of(1, 9)) == []
    assert bench.tracker.is_settled
    assert bench.hot.num_resident(("t", "s")) == 1


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({}, SessionRef("t", "s", b"ab")),
        ({"kv_transfer_params": None}, None),
        ({"kv_transfer_params": None, "session_id": "vLLM's"}, SessionRef("", "vLLM's", b"ab")),
        ({"kv_transfer_params": {"thermocline": {"tenant": "t"}}}, None),
        ({"lora_request": object()}, None),
    ],
    ids=["ours", "none", "vLLM's own", "half a name", "with an adapter"],
)
def test_a_turn_is_saved_for_the_session_that_it_names(bench, fields, session):
    saves = bench.end_turn(**fields)
    assert [x.session for x in saves] == ([session] if session else [])
    assert bench.tracker.is_settled == (session is None)


def image(offset: int) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=9))


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


def ran(bench: Bench) -> None:
    """One whole turn that was saved and left its blocks in vLLM's pool."""
    for save in bench.end_turn():
        bench.acknowledge(save)


def test_demoted_blocks_are_gone_before_the_next_look(bench):
    ran(bench)
    assert bench.hot.num_resident(("t", "s")) == 10
    bench.hot.ask_to_drop(("t", "s"))
    assert bench.hot.num_resident(("t", "s")) == 0
    assert bench.pool.cached  # vLLM's tables change on vLLM's thread only
    bench.add([7] * len(PROMPT), name="other", session="other")
    assert not bench.pool.cached


def test_a_turn_that_came_meanwhile_keeps_its_blocks(bench):
    ran(bench)
    bench.hot.ask_to_drop(("t", "s"))
    bench.hot.begin(SessionRef("t", "s", b""))
    bench.add(name="again")
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
    (save,) = bench.end_turn()
    assert (bench.hot.num_used_blocks(), bench.hot.num_idle_blocks()) == (10, 0)
    bench.acknowledge(save)
    assert (bench.hot.num_used_blocks(), bench.hot.num_idle_blocks()) == (0, 10)
    bench.add(name="again")
    assert bench.hot.num_idle_blocks() == 0


# ---- saves that were skipped because too much waited, and their later attempts


def two_turns(bench: Bench) -> tuple[Save, Save]:
    """The second one's save is skipped, and the first one's still waits."""
    (first,), (second,) = bench.end_turn(PROMPT, "a"), bench.end_turn(OTHER, "b")
    bench.acknowledge(second, 1, skipped=True)
    bench.acknowledge(second, 1)
    return first, second


def test_two_long_turns_are_both_saved_though_the_queue_takes_one(bench):
    first, second = two_turns(bench)
    assert bench.hot.is_saving(("t", "b"))
    assert not any(bench.pool.blocks[x].ref_cnt for x in second.block_ids)
    assert bench.planned() == []
    assert bench.tracker.has_work
    bench.acknowledge(first)
    assert not bench.hot.is_saving(("t", "a"))
    (again,) = bench.planned()
    fields = ("session", "hashes", "block_ids")
    assert [getattr(again, x) for x in fields] == [getattr(second, x) for x in fields]
    assert again.waits
    assert all(bench.pool.blocks[x].ref_cnt == 1 for x in again.block_ids)
    assert bench.hot.is_saving(("t", "b"))
    bench.acknowledge(again)
    assert not bench.hot.is_saving(("t", "b"))
    assert bench.tracker.is_settled
    assert not any(x.ref_cnt for x in bench.pool.blocks)


def test_blocks_that_vllm_has_reused_meanwhile_are_not_saved(bench):
    first, second = two_turns(bench)
    del bench.pool.cached[second.hashes[6]]
    bench.acknowledge(first)
    (again,) = bench.planned()
    assert (again.hashes, again.block_ids) == (second.hashes[:6], second.block_ids[:6])
    del bench.pool.cached[second.hashes[0]]
    bench.acknowledge(again, skipped=True)  # it cannot be, but if it were
    assert bench.planned() == []
    assert bench.tracker.is_settled


def test_they_come_one_at_a_time(bench):
    saves = [bench.end_turn(tokens_of(4, first=1000 * i), f"s{i}")[0] for i in range(4)]
    for save in saves[1:]:
        bench.acknowledge(save, skipped=True)
    bench.acknowledge(saves[0])
    for save in saves[1:]:
        again = bench.planned()
        assert [x.session for x in again] == [save.session]
        assert bench.planned() == []
        bench.acknowledge(again[0])
    assert bench.tracker.is_settled


def test_the_next_turn_saves_it_all(bench):
    first, _ = two_turns(bench)
    (third,) = bench.end_turn([*OTHER[: 10 * BLOCK], *tokens_of(8, 2, 3000)], "b")
    bench.acknowledge(first)
    bench.acknowledge(third)
    assert bench.planned() == []
    assert bench.tracker.is_settled


def test_a_session_that_is_dropped_does_not_come_back(bench):
    first, _ = two_turns(bench)
    bench.hot.ask_to_drop(("t", "b"))
    bench.acknowledge(first)
    assert bench.planned() == []
    assert bench.tracker.is_settled
    assert not bench.hot.is_saving(("t", "b"))
    bench.end_turn(OTHER, "b")
    assert bench.hot.is_saving(("t", "b"))


def test_only_so_many_are_kept_in_mind(bench, monkeypatch):
    monkeypatch.setattr(turn_saves, "MAX_POSTPONED", 2)
    (first,) = bench.end_turn(PROMPT, "first")
    for i in range(5):
        (save,) = bench.end_turn(tokens_of(4, first=1000 * i), f"s{i}")
        bench.acknowledge(save, skipped=True)
    assert [bench.hot.is_saving(("t", f"s{i}")) for i in range(5)] == [False] * 3 + [True] * 2
    bench.acknowledge(first)
    for name in ("s3", "s4"):
        (again,) = bench.planned()
        assert again.session.id == name
        bench.acknowledge(again)
    assert bench.tracker.is_settled


def test_a_state_is_made_up_for_too():
    bench = new_group_bench()
    save = group_turn(bench, TABLES, len(PROMPT))
    bench.acknowledge(save, 1, skipped=True)
    (again,) = bench.planned()
    assert (again.hashes, again.states) == (hashes(PROMPT), {10: [59, 77, 78, 79]})
