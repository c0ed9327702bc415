"""When a save is whole."""

from __future__ import annotations

from engines.vllm_plugin.messages import RankSaved
from engines.vllm_plugin.save_tally import MAX_OPEN, SaveTally
from tests.block_sessions import ref


def told(tally: SaveTally, job: int, *kept: bool) -> list[bool]:
    return [tally.is_whole(RankSaved(job, ref(), x)) for x in kept]


def test_the_last_rank_makes_a_save_whole() -> None:
    tally = SaveTally(2)
    assert told(tally, 1, True, True) == [False, True]
    assert len(tally) == 0


def test_a_rank_that_skipped_leaves_nothing_behind_for_the_next_save() -> None:
    tally = SaveTally(3)
    assert told(tally, 1, False, True, True) == [False, False, False]
    assert told(tally, 2, True, False, False) == [False, False, False]
    assert len(tally) == 0
    assert told(tally, 3, True, True, True) == [False, False, True]


def test_saves_of_one_session_are_told_apart() -> None:
    tally = SaveTally(2)
    assert told(tally, 1, True) + told(tally, 2, True) == [False, False]
    assert told(tally, 1, True) + told(tally, 2, True) == [True, True]


def test_saves_that_a_lost_rank_never_tells_of_are_bounded() -> None:
    tally = SaveTally(2)
    for job in range(2 * MAX_OPEN):
        told(tally, job, True)
    assert len(tally) == MAX_OPEN
    assert told(tally, 2 * MAX_OPEN - 1, True) == [True]
