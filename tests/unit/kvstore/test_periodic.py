"""The thread that looks after things."""

from __future__ import annotations

import threading

from kvstore.periodic import Periodic


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
