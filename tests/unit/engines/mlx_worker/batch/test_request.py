from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from engines.mlx_worker.batch.batches import token_event
from engines.mlx_worker.batch.request import SamplingGuard
from engines.mlx_worker.generation import SequenceSampling

pytestmark = pytest.mark.mlx

LOGITS = mx.array([[0.0, 3.0, 1.0]])
SEEN = mx.array([1, 2])


def test_a_greedy_answer_without_processors_needs_no_guard() -> None:
    guard = SamplingGuard(SequenceSampling())
    assert guard.sampler is None and guard.processors == ()


def test_processors_run_in_order_and_samplers_decide() -> None:
    guard = SamplingGuard(
        SequenceSampling(lambda x: x.argmin(-1), [lambda t, x: x + 1, lambda t, x: x * 2])
    )
    (process,) = guard.processors
    assert process(SEEN, LOGITS).tolist() == [[2.0, 8.0, 4.0]]
    assert guard.sampler(LOGITS).tolist() == [0]
    assert not guard.is_faulty_within(1_000_000)


def raises(*arguments: mx.array) -> mx.array:
    raise KeyError("x")


@pytest.mark.parametrize("sampling", [(raises,), (None, [raises]), (raises, [raises])])
def test_the_first_fault_is_kept_and_says_from_which_token_on(sampling: tuple[Any, ...]) -> None:
    guard = SamplingGuard(SequenceSampling(*sampling))
    for _ in range(3):
        logits = LOGITS
        for process in guard.processors:
            logits = process(SEEN, logits)
        if guard.sampler is not None:
            assert guard.sampler(logits).tolist() == [1]
    assert isinstance(guard.fault, KeyError)
    assert guard.is_faulty_within(1) and not guard.is_faulty_within(0)


def test_a_fault_after_the_last_token_spoils_nothing() -> None:
    calls: list[int] = []

    def late(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) > 3:
            raise KeyError("x")
        return logits

    guard = SamplingGuard(SequenceSampling(lambda x: mx.array([0]), [late]))
    for _ in range(4):
        guard.processors[0](SEEN, LOGITS)
        guard.sampler(LOGITS)
    assert not guard.is_faulty_within(3) and guard.is_faulty_within(4)


def test_alternatives_are_sorted_and_come_with_the_chosen_token() -> None:
    logprobs = mx.array([-3.0, -1.0, -2.0, -1.0], mx.bfloat16)
    event = token_event(0, 0, logprobs, 3)
    assert event.logprob == -3.0
    assert list(event.top) == [(1, -1.0), (3, -1.0), (2, -2.0)]
    assert token_event(0, 2, logprobs, 0).top == []
    assert token_event(0, 2, logprobs, None).logprob is None
    assert len(token_event(0, 2, logprobs, 20).top) == 4
