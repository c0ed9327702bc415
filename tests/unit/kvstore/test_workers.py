"""Cores that may be used, and a task at intervals."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvstore.workers import Periodic, memory_nodes, usable_cores


@pytest.mark.parametrize(("allowed", "number"), [("0", 1), ("1", 1), ("0-1", 2), ("0,2-4,9", 5)])
def test_memory_nodes_are_those_that_are_allowed(tmp_path: Path, allowed: str, number: int) -> None:
    status = tmp_path / "status"
    status.write_text(
        f"Name:\tx\nMems_allowed:\t00000001\nMems_allowed_list:\t{allowed}\nEnd:\t1\n"
    )
    assert memory_nodes(status) == number
    status.write_text("Name:\tx\n")
    assert memory_nodes(status) == 1
    assert memory_nodes(tmp_path / "not-there") == 1


@pytest.mark.parametrize(("text", "most"), [("100000 100000", 1), ("max 100000", None)])
def test_a_containers_quota_counts(tmp_path: Path, text: str, most: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    without = usable_cores(tmp_path / "not-there")
    assert usable_cores(quota) == (min(most, without) if most else without)


def test_a_round_that_fails_is_not_the_last_one(caplog):
    rounds, third = [], threading.Event()

    def work() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 3:
            third.set()
        raise RuntimeError("a bad round")

    looking = Periodic(work, 0.001, "test-rounds")
    assert third.wait(10)
    looking.close()
    assert "a round of test-rounds failed" in caplog.text


def test_closing_waits_for_a_round_and_ends_them():
    inside, go_on, rounds = threading.Event(), threading.Event(), []

    def work() -> None:
        inside.set()
        assert go_on.wait(10)
        rounds.append(1)

    looking = Periodic(work, 0.001, "test-rounds")
    assert inside.wait(10)
    threading.Timer(0.05, go_on.set).start()
    looking.close()
    assert rounds == [1]
