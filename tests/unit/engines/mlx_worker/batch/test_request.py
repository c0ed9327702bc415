from __future__ import annotations

import weakref

import mlx.core as mx
import pytest

from engines.mlx_worker.batch.batches import token_event
from engines.mlx_worker.batch.request import SamplingGuard
from engines.mlx_worker.generation import EventQueue, Failed, Finished, SequenceSampling

pytestmark = pytest.mark.mlx

LOGITS = mx.array([[0.0, 3.0, 1.0]])
SEEN = mx.array([1, 2])


def test_processors_run_in_order_and_samplers_decide() -> None:
    guard = SamplingGuard(
        SequenceSampling(lambda x: x.argmin(-1), [lambda t, x: x + 1, lambda t, x: x * 2])
    )
    (process,) = guard.processors
    assert process(SEEN, LOGITS).tolist() == [[2.0, 8.0, 4.0]]
    assert guard.sampler(LOGITS).tolist() == [0]
    assert not guard.is_faulty_within(1_000_000)


def test_alternatives_are_sorted_and_come_with_the_chosen_token() -> None:
    logprobs = mx.array([-3.0, -1.0, -2.0, -1.0], mx.bfloat16)
    event = token_event(0, 0, logprobs, 3)
    assert event.logprob == -3.0
    assert list(event.top) == [(1, -1.0), (3, -1.0), (2, -2.0)]
    assert token_event(0, 2, logprobs, 0).top == []
    assert token_event(0, 2, logprobs, None).logprob is None
    assert len(token_event(0, 2, logprobs, 20).top) == 4


@pytest.mark.parametrize("end", [Finished(0, "stop"), Failed("no"), None])
async def test_a_stream_that_is_over_does_not_hold_its_request(end):
    asked: list[int | None] = []

    def stop(index: int | None) -> None:
        asked.append(index)

    held = weakref.ref(stop)
    stream = EventQueue(1, stop)
    del stop
    stream.stop(0)
    assert asked == [0]
    if end is None:
        stream.cancel()
    else:
        stream.deliver(end)
        assert [x async for x in stream.events()] == [end]
    assert held() is None
    stream.stop(0)  # too late, and harmless
