"""The line between the measuring thread and the owner thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engines.calibration.instrument import Interrupted
from engines.mlx_worker.measuring.steps import IdleSteps


class Owner:
    """Stands in for a thread: does a step on request, and is woken by each that comes in."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.steps = IdleSteps(wake=self.woken.set)

    def until_one_waits(self) -> None:
        assert self.woken.wait(10)
        self.woken.clear()


def test_a_step_runs_where_it_is_done_and_its_result_comes_back() -> None:
    owner = Owner()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(owner.steps.run, threading.get_ident)
        owner.until_one_waits()
        assert owner.steps.is_waiting and not running.done()
        owner.steps.do_one()
        assert running.result(10) == threading.get_ident()
        assert not owner.steps.is_waiting and owner.steps.num_done == 1


def test_an_error_of_a_step_is_raised_in_the_thread_that_asked() -> None:
    owner = Owner()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(owner.steps.run, lambda: 1 // 0)
        owner.until_one_waits()
        owner.steps.do_one()
        with pytest.raises(ZeroDivisionError):
            running.result(10)


def test_the_end_interrupts_who_waits_and_who_comes_later() -> None:
    owner = Owner()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(owner.steps.run, lambda: 1)
        owner.until_one_waits()
        owner.steps.close()
        with pytest.raises(Interrupted):
            running.result(10)
    with pytest.raises(Interrupted):
        owner.steps.run(lambda: 1)
    owner.steps.do_one()
    assert owner.steps.num_done == 0


def test_it_counts_how_long_steps_waited_for_their_turn() -> None:
    now = 5.0
    woken = threading.Event()
    steps = IdleSteps(woken.set, lambda: now)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(steps.run, lambda: None)
        assert woken.wait(10)
        now = 8.0
        steps.do_one()
        running.result(10)
    assert steps.waited_s == 3.0


def test_it_knows_how_long_no_request_has_used_the_model() -> None:
    now = 5.0
    steps = IdleSteps(lambda: None, lambda: now)
    assert steps.alone_s > 1e9
    steps.note_others()
    now = 8.0
    assert steps.alone_s == 3.0
