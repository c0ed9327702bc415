"""The tokens after the last full block, from the turn that computed them to the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.vllm_plugin.messages import Stage
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.scheduler.tracked_request import ids_between, num_common
from tests.block_sessions import BLOCK, hashes, ref, rows_behind
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import (
    Bench,
    Request,
    new_bench,
)
from tests.unit.engines.vllm_plugin.worker.test_transfer import CHAIN, IDS, Rank, ended_loads

TURN = list(range(43))  # ten blocks and three tokens, of which the last has no KV yet
PART = (40, 41)
NEXT = [*TURN, 900, 901]
FOREIGN = 7.0  # left in a block by another session


@pytest.fixture
def bench() -> Bench:
    return new_bench(keeps_parts=True)


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.transfer.close()
    rank.store.close()


def image(offset: int, length: int) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))


# ---- which tokens


def test_ids_that_say_all_of_their_kv():
    request = Request(TURN)
    assert ids_between(request, 40, 42) == PART
    request.prompt_embeds = object()
    assert ids_between(request, 40, 42) == ()


@pytest.mark.parametrize(
    ("offset", "length", "kept"),
    [(30, 10, True), (30, 11, False), (41, 1, False), (41, 9, False), (42, 1, True)],
)
def test_an_image_is_more_than_the_ids_in_its_place(offset, length, kept):
    request = Request(TURN, mm_features=[image(offset, length)])
    assert ids_between(request, 40, 42) == (PART if kept else ())
    assert num_common(PART, request, 40, 42) == (2 if kept else 0)


@pytest.mark.parametrize(
    ("prompt", "last", "common"),
    [
        (NEXT, 44, 2),
        (NEXT, 41, 1),
        ([*TURN[:41], 5, 6], 42, 1),
        ([*TURN[:40], 5, 6], 41, 0),
        (TURN[:40], 39, 0),
    ],
)
def test_a_prompt_may_go_on_with_some_of_them(prompt, last, common):
    assert num_common(PART, Request(prompt), 40, last) == common


# ---- beside the scheduler


def ended(bench: Bench, tokens: list[int] = TURN, **fields: Any) -> Save | None:
    request = bench.add(tokens, name="before", num_computed_tokens=len(tokens) - 1, **fields)
    ids = [*bench.pool.fill(request.block_hashes), 60]
    bench.tracker.finished(request, [ids])
    saves = bench.tracker.take_step([]).saves
    for save in saves:
        assert bench.pool.blocks[60].ref_cnt == len(save.block_ids) - len(save.hashes)
        bench.tracker.absorb(set(), [], {save.job: 2})
    return saves[0] if saves else None


def test_a_turn_is_saved_with_the_tokens_after_its_last_block(bench):
    save = ended(bench)
    assert (save.part, len(save.hashes), save.block_ids[-1]) == (PART, 10, 60)
    assert bench.pool.freed[0] == 60  # the tail is reused first
    assert bench.pool.blocks[60].ref_cnt == 0


def test_tokens_of_a_step_in_flight_are_not_in_it(bench):
    assert ended(bench, num_in_flight_tokens=1).part == (40,)
    assert ended(bench, num_in_flight_tokens=2).part == ()


def test_a_turn_of_whole_blocks_and_one_of_none(bench):
    save = ended(bench, TURN[:41])
    assert (save.part, len(save.block_ids)) == ((), 10)
    assert ended(bench, [1, 2, 3]) is None


def test_engines_that_gain_nothing_by_it_keep_none():
    bench = new_bench(keeps_parts=False)
    assert ended(bench).part == ()
    request = bench.add(NEXT)
    bench.tracker.match(request, 0)
    bench.ranks.answer(10, part=PART)
    assert bench.tracker.match(request, 0) == (40, True)


@pytest.mark.parametrize(("last", "rows"), [([41, 42, 900], 2), ([5, 6, 900], 1), ([], 0)])
def test_it_is_offered_as_far_as_the_prompt_follows_it(bench, last, rows):
    request = bench.add([*TURN[:41], *last], name="r-tcm" + "0" * 24)
    bench.tracker.match(request, 0)
    bench.ranks.answer(10, part=PART)
    assert bench.tracker.match(request, 0) == (40 + rows, True)
    ids = list(range(20, 31))
    bench.tracker.allocated(request, [ids], 40 + rows)
    (load,) = bench.tracker.take_step([]).loads
    assert (load.first_block, load.end_block, load.part_tokens) == (0, 10, rows)
    assert load.block_ids == ids[: 10 + bool(rows)]
    bench.tracker.absorb(set(), [request.request_id], {})
    bench.tracker.take_step([(request.request_id, 40 + rows)])
    assert bench.admitted == [("tcm" + "0" * 24, f"cold-ram; tokens={40 + rows}")]
    assert bench.counters.as_dict()["restored_tokens"] == 40 + rows


def test_one_token_is_left_to_compute_of_it_too(bench):
    request = bench.add(TURN[:42])
    bench.tracker.match(request, 0)
    bench.ranks.answer(10, part=PART)
    assert bench.tracker.match(request, 0) == (41, True)


def test_one_that_cannot_be_restored_is_computed_and_not_asked_for_again(bench):
    request = bench.add(NEXT, name="r-tcm" + "0" * 24)
    bench.tracker.match(request, 0)
    bench.ranks.answer(10, part=PART)
    bench.tracker.allocated(request, [list(range(20, 31))], bench.tracker.match(request, 0)[0])
    bench.tracker.take_step([])
    bench.tracker.absorb({30}, [request.request_id], {})
    assert bench.tracker.match(request, 0) == (0, False)
    assert bench.counters.as_dict()["loads_failed"] == 1


def hot(bench: Bench, prompt: list[int] = TURN) -> Request:
    """The session of the turn comes back, with all its full blocks in vLLM's hands."""
    ended(bench)
    request = bench.add(prompt, name="r-tcm" + "0" * 24)
    return request


def test_a_hot_session_gets_it_too_and_stays_hot(bench):
    request = hot(bench)
    assert bench.tracker.match(request, 40) == (None, False)
    assert bench.ranks.sent[-1].first_block == 10
    bench.ranks.answer(10, part=PART)
    assert bench.tracker.match(request, 40) == (2, True)
    bench.tracker.allocated(request, [list(range(20, 31))], 2)
    (load,) = bench.tracker.take_step([]).loads
    assert (load.first_block, load.block_ids, load.part_tokens) == (10, [30], 2)
    bench.tracker.absorb(set(), [request.request_id], {})
    bench.tracker.take_step([(request.request_id, 42)])
    assert bench.admitted == [("tcm" + "0" * 24, "hot; tokens=42")]


@pytest.mark.parametrize("prompt", [[*TURN[:40], 5, 6, 7], [5, *TURN[1:], 6], TURN[:41]])
def test_a_hot_session_that_goes_on_otherwise_asks_for_nothing(bench, prompt):
    request = hot(bench, prompt)
    assert bench.tracker.match(request, 40) == (0, False)
    assert not any(isinstance(x, Stage) for x in bench.ranks.sent)


def test_a_hot_session_does_not_wait_for_it_while_others_run(bench):
    """Each step of a model that runs for another request takes longer than computing it."""
    request = hot(bench)
    bench.add(name="running")
    bench.tracker.take_step([("running", 0)])
    assert bench.tracker.match(request, 40) == (0, False)


def test_a_dropped_session_is_not_hot(bench):
    request = hot(bench)
    bench.tracker.finished(request, [[]])
    bench.hot.ask_to_drop(("t", "s"))
    bench.tracker.take_step([])
    assert bench.hot.part_after(ref(), 10, request.block_hashes[9]) == ()


# ---- in a worker


def saved(rank: Rank, part: tuple[int, ...] = (100, 101)) -> None:
    rank.blocks.compute(CHAIN, IDS)
    for page in (page for sides in rank.blocks.pages for page in sides):
        page[60] = FOREIGN
    rank.blocks.write_part(60, rows_behind(CHAIN, part))
    save = Save(1, ref(), CHAIN, [*IDS, 60], part=part)
    rank.transfer.save(save, rank.on_ended)
    assert rank.transfer.wait_saved(ref(), 10)
    assert rank.ended == [(1, True)]


def holds_part(rank: Rank, block: int, part: tuple[int, ...]) -> bool:
    """These rows, followed by those that were there."""
    pairs = zip(rank.blocks.read([block]), rows_behind(CHAIN, part), strict=True)
    return all(
        np.array_equal(a[:, : len(part)], b) and not a[:, len(part) :].any()
        for found, wanted in pairs
        for a, b in zip(found, wanted, strict=True)
    )


def loaded(rank: Rank, load: Load) -> tuple[set[str], set[int]]:
    rank.transfer.load(load)
    return ended_loads(rank.transfer), rank.transfer.take_bad_blocks()


@pytest.mark.parametrize("rows", [1, 2])
def test_its_rows_come_back_and_none_of_another_session(rank, rows):
    saved(rank)
    blob = rank.store.fetch(ref(), CHAIN, 25).spans[0][1]
    assert np.float32(FOREIGN).tobytes() not in bytes(blob.payload)
    rank.stage()
    target = list(range(1, 27))
    assert loaded(rank, Load(7, "r", 0, target, part_tokens=rows)) == ({"r"}, set())
    assert rank.blocks.holds(CHAIN, 0, target[:25])
    assert holds_part(rank, 26, (100, 101)[:rows])


def test_nothing_is_written_of_one_that_was_not_wanted(rank):
    saved(rank)
    rank.stage()
    assert loaded(rank, Load(7, "r", 0, list(range(1, 26)))) == ({"r"}, set())
    assert not any(page[[0, 26]].any() for sides in rank.blocks.pages for page in sides)


def test_one_that_is_gone_fails_its_own_block_only(rank):
    saved(rank)
    rank.staging.expect(7)
    rank.staging.put(7, rank.store.fetch(None, CHAIN, 0))  # by content: without it
    load = Load(7, "r", 0, list(range(1, 27)), part_tokens=2)
    assert loaded(rank, load) == ({"r"}, {26})


def test_when_its_block_is_full_only_that_is_packed(rank):
    saved(rank)
    longer = hashes(list(range(104)))
    rank.blocks.compute(longer, [*IDS, 60])
    encoded = rank.store.counters.as_dict()["chunks_encoded"]
    rank.transfer.save(Save(2, ref(), longer, [*IDS, 60]), rank.on_ended)
    assert rank.transfer.wait_saved(ref(), 10)
    assert rank.store.counters.as_dict()["chunks_encoded"] == encoded + 1
    assert not any(x.is_part for x in rank.store.missing(longer))
    fetched = rank.store.fetch(ref(), longer, 0)
    assert (fetched.end_block, fetched.part) == (len(longer), ())
    assert BLOCK * fetched.end_block == rank.store.record(ref()).num_tokens
