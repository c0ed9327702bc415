"""Saves that were skipped because too much waited, and their later attempts."""

from __future__ import annotations

from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.scheduler import turn_saves
from tests.block_sessions import BLOCK, hashes, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import PROMPT, Bench
from tests.unit.engines.vllm_plugin.test_groups import TABLES, new_group_bench
from tests.unit.engines.vllm_plugin.test_groups import ended as group_turn

OTHER = tokens_of(10, 2, 2000)


def turn(bench: Bench, session: str, tokens: list[int]) -> Save:
    request = bench.add(tokens, name=session, session=session, num_computed_tokens=len(tokens))
    ids = bench.pool.fill(request.block_hashes)
    bench.tracker.finished(request, [ids])
    return planned(bench)[0]


def planned(bench: Bench) -> list[Save]:
    return bench.tracker.take_step([], []).saves


def skipped(bench: Bench, save: Save) -> None:
    """Acknowledge the save; one rank skipped it, and the other has it."""
    bench.tracker.absorb(set(), [], {save.job: 1}, [], skipped={save.job})
    bench.tracker.absorb(set(), [], {save.job: 1}, [], [])


def saved(bench: Bench, save: Save) -> None:
    bench.tracker.absorb(set(), [], {save.job: 2}, [], [])


def test_two_long_turns_are_both_saved_though_the_queue_takes_one(bench):
    first, second = turn(bench, "a", PROMPT), turn(bench, "b", OTHER)
    skipped(bench, second)
    assert not any(bench.pool.blocks[x].ref_cnt for x in second.block_ids)
    assert planned(bench) == []  # the first still waits
    assert bench.tracker.has_work
    saved(bench, first)
    again = planned(bench)[0]
    fields = ("session", "hashes", "block_ids")
    assert [getattr(again, x) for x in fields] == [getattr(second, x) for x in fields]
    assert again.waits
    assert all(bench.pool.blocks[x].ref_cnt == 1 for x in again.block_ids)
    saved(bench, again)
    assert bench.tracker.is_settled
    assert not any(x.ref_cnt for x in bench.pool.blocks)


def test_blocks_that_vllm_has_reused_meanwhile_are_not_saved(bench):
    first, second = turn(bench, "a", PROMPT), turn(bench, "b", OTHER)
    skipped(bench, second)
    del bench.pool.cached[second.hashes[6]]
    saved(bench, first)
    again = planned(bench)[0]
    assert (again.hashes, again.block_ids) == (second.hashes[:6], second.block_ids[:6])
    del bench.pool.cached[second.hashes[0]]
    skipped(bench, again)  # it cannot be, but if it were
    assert planned(bench) == []
    assert bench.tracker.is_settled


def test_they_come_one_at_a_time(bench):
    saves = [turn(bench, f"s{i}", tokens_of(4, first=1000 * i)) for i in range(4)]
    for save in saves[1:]:
        skipped(bench, save)
    saved(bench, saves[0])
    for save in saves[1:]:
        again = planned(bench)
        assert [x.session for x in again] == [save.session]
        assert planned(bench) == []
        saved(bench, again[0])
    assert bench.tracker.is_settled


def test_the_next_turn_saves_it_all(bench):
    first, second = turn(bench, "a", PROMPT), turn(bench, "b", OTHER)
    skipped(bench, second)
    third = turn(bench, "b", [*OTHER[: 10 * BLOCK], *tokens_of(8, 2, 3000)])
    saved(bench, first)
    saved(bench, third)
    assert planned(bench) == []
    assert bench.tracker.is_settled


def test_a_session_counts_as_being_saved_until_it_is(bench):
    first, second = turn(bench, "a", PROMPT), turn(bench, "b", OTHER)
    saved(bench, first)
    assert not bench.hot.is_saving(("t", "a"))
    skipped(bench, second)
    assert bench.hot.is_saving(("t", "b"))
    saved(bench, planned(bench)[0])
    assert not bench.hot.is_saving(("t", "b"))


def test_a_session_that_is_dropped_does_not_come_back(bench):
    first, second = turn(bench, "a", PROMPT), turn(bench, "b", OTHER)
    skipped(bench, second)
    bench.hot.ask_to_drop(("t", "b"))
    saved(bench, first)
    assert planned(bench) == []
    assert bench.tracker.is_settled
    assert not bench.hot.is_saving(("t", "b"))


def test_only_so_many_are_kept_in_mind(bench, monkeypatch):
    monkeypatch.setattr(turn_saves, "MAX_POSTPONED", 2)
    first = turn(bench, "first", PROMPT)
    for i in range(5):
        skipped(bench, turn(bench, f"s{i}", tokens_of(4, first=1000 * i)))
    assert [bench.hot.is_saving(("t", f"s{i}")) for i in range(5)] == [False] * 3 + [True] * 2
    saved(bench, first)
    for name in ("s3", "s4"):
        again = planned(bench)[0]
        assert again.session.id == name
        saved(bench, again)
    assert bench.tracker.is_settled


def test_a_state_is_made_up_for_too():
    bench = new_group_bench()
    save = group_turn(bench, TABLES, len(PROMPT))
    bench.tracker.absorb(set(), [], {save.job: 1}, [], skipped={save.job})
    again = bench.tracker.take_step([], []).saves[0]
    assert (again.hashes, again.states) == (hashes(PROMPT), {10: [59, 77, 78, 79]})
