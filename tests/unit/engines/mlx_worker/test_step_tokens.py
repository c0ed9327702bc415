"""A step of a measurement is as long as the model is small."""

from __future__ import annotations

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
from tests.integration.tiny_models import tiny_model


@given(st.integers(1, 10**13), st.booleans())
def test_a_step_stays_within_its_work(num_parameters: int, on_gpu: bool) -> None:
    tokens, work = step_tokens(num_parameters, on_gpu=on_gpu), GPU_WORK if on_gpu else CPU_WORK
    assert tokens & (tokens - 1) == 0 and SMALLEST <= tokens <= LARGEST
    assert tokens * num_parameters <= work or tokens == SMALLEST
    assert 2 * tokens * num_parameters > work or tokens == LARGEST


def test_usual_models() -> None:
    assert [step_tokens(x, on_gpu=False) for x in (135_000_000, 8_000_000_000)] == [128, SMALLEST]
    assert [step_tokens(x, on_gpu=True) for x in (135_000_000, 8_000_000_000)] == [LARGEST, 64]


def test_a_tiny_model_has_the_longest_steps() -> None:
    assert step_tokens_of(tiny_model("llama").model) == LARGEST
