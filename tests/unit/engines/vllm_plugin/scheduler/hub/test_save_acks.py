"""When a save is complete."""

from __future__ import annotations

from engines.vllm_plugin.messages import RankSaved
from engines.vllm_plugin.scheduler.hub.save_acks import MAX_OPEN, SaveAcks
from tests.block_sessions import ref


def completed(acks: SaveAcks, job: int, *kept: bool) -> list[bool]:
    return [acks.completes(RankSaved(job, ref(), x)) for x in kept]


def test_the_last_rank_makes_a_save_complete() -> None:
    acks = SaveAcks(2)
    assert completed(acks, 1, True, True) == [False, True]
    assert len(acks) == 0


def test_a_rank_that_skipped_leaves_nothing_behind_for_the_next_save() -> None:
    acks = SaveAcks(3)
    assert completed(acks, 1, False, True, True) == [False, False, False]
    assert completed(acks, 2, True, False, False) == [False, False, False]
    assert len(acks) == 0
    assert completed(acks, 3, True, True, True) == [False, False, True]


def test_saves_of_one_session_are_kept_apart() -> None:
    acks = SaveAcks(2)
    assert completed(acks, 1, True) + completed(acks, 2, True) == [False, False]
    assert completed(acks, 1, True) + completed(acks, 2, True) == [True, True]


def test_saves_that_a_lost_rank_never_reports_are_bounded() -> None:
    acks = SaveAcks(2)
    for job in range(2 * MAX_OPEN):
        completed(acks, job, True)
    assert len(acks) == MAX_OPEN
    assert completed(acks, 2 * MAX_OPEN - 1, True) == [True]
