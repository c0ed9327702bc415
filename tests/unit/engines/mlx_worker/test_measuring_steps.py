"""Steps of a measurement: their line to the owner thread, and their length."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mlx_worker.measuring.instrument import (
    CPU_WORK,
    GPU_WORK,
    LARGEST,
    SMALLEST,
    step_tokens,
    step_tokens_of,
)
from engines.mlx_worker.measuring.steps import IdleSteps
from tests.integration.tiny_models import tiny_model


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
        running = pool.submit(owner.steps.run, lambda: 1 // 0)
        owner.until_one_waits()
        owner.steps.do_one()
        with pytest.raises(ZeroDivisionError):
            running.result(10)


def test_it_counts_how_long_steps_waited_and_no_request_has_used_the_model() -> None:
    now = 5.0
    woken = threading.Event()
    steps = IdleSteps(woken.set, lambda: now)
    assert steps.alone_s > 1e9
    steps.note_others()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(steps.run, lambda: None)
        assert woken.wait(10)
        now = 8.0
        steps.do_one()
        running.result(10)
    assert steps.waited_s == steps.alone_s == 3.0


@given(st.integers(1, 10**13), st.booleans())
def test_a_step_stays_within_its_work(num_parameters: int, on_gpu: bool) -> None:
    tokens, work = step_tokens(num_parameters, on_gpu=on_gpu), GPU_WORK if on_gpu else CPU_WORK
    assert tokens & (tokens - 1) == 0 and SMALLEST <= tokens <= LARGEST
    assert tokens * num_parameters <= work or tokens == SMALLEST
    assert 2 * tokens * num_parameters > work or tokens == LARGEST


def test_a_tiny_model_has_the_longest_steps() -> None:
    assert step_tokens_of(tiny_model("llama").model) == LARGEST
