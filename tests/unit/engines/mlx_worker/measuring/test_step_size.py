"""A step of a measurement is as long as the machine is quick."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.mlx_worker.measuring.step_size import FIRST, LARGEST, SMALLEST, StepSize


def settled(seconds_per_token: float, steps: int = 12) -> StepSize:
    size = StepSize(target_s=0.25)
    for _ in range(steps):
        size.took(size.tokens, size.tokens * seconds_per_token)
    return size


@given(st.floats(1e-5, 0.03))
def test_a_step_stays_below_its_target(seconds_per_token: float) -> None:
    tokens = settled(seconds_per_token).tokens
    assert tokens * seconds_per_token <= 0.25 or tokens == SMALLEST
    assert 4 * tokens * seconds_per_token > 0.25 or tokens == LARGEST


def test_it_follows_a_machine_that_becomes_slow_and_quick_again() -> None:
    size = settled(0.0001)
    assert size.tokens == LARGEST
    size.took(size.tokens, 3.0)
    size.took(size.tokens, 3.0)
    assert size.tokens == LARGEST // 4
    size.took(size.tokens, 0.01)
    assert size.tokens == LARGEST // 2


def test_the_rest_of_a_text_says_nothing() -> None:
    size = StepSize(target_s=0.25)
    size.took(3, 0.001)
    assert size.tokens == FIRST


def test_steps_are_longer_while_nobody_asks_for_anything() -> None:
    size = settled(0.004)
    assert size.tokens == 32
    size.expect(alone_s=60.0)
    for _ in range(4):
        size.took(size.tokens, size.tokens * 0.004)
    assert size.tokens == 128
    size.expect(alone_s=1.0)
    assert size.tokens == 32, "the very next step is short again"
