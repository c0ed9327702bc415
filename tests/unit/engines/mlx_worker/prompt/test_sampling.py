from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engines.mlx_worker.prompt.sampling import SamplingParams, SeededSampler, filtered

pytestmark = pytest.mark.mlx


def logprobs(*probabilities: float) -> mx.array:
    return mx.array(np.log(np.array([probabilities], np.float32)))


NUM_LEFT = [
    (SamplingParams(), 4),
    *((SamplingParams(top_k=x), num) for x, num in ((2, 2), (99, 4))),
    *((SamplingParams(top_p=x), num) for x, num in ((0.5, 1), (0.51, 2), (1e-6, 1))),
    *((SamplingParams(min_p=x), num) for x, num in ((0.5, 2), (1.0, 1))),
    (SamplingParams(top_k=3, top_p=0.9), 3),
    # Of the two best, 0.5 and 0.3, the first alone holds 62 % of the mass.
    (SamplingParams(top_k=2, top_p=0.6), 1),
    # Temperature comes first: at 0.1 nearly all mass is on the best.
    (SamplingParams(temperature=0.1, top_p=0.9), 1),
]


@pytest.mark.parametrize(("sampling", "num_left"), NUM_LEFT)
def test_filters(sampling: SamplingParams, num_left: int) -> None:
    kept = filtered(logprobs(0.5, 0.3, 0.15, 0.05), sampling)[0]
    assert np.flatnonzero(np.isfinite(np.array(kept))).tolist() == list(range(num_left))


def test_filters_survive_extremes() -> None:
    flat = mx.array([[-1e4, -1e4 - 1, -mx.inf]])
    for sampling in (
        SamplingParams(temperature=1e-4, top_p=0.5),
        SamplingParams(temperature=2, min_p=0.01),
    ):
        kept = np.array(filtered(flat, sampling))
        assert np.isfinite(kept[0, 0])
        assert kept[0, 2] == -np.inf
    only = filtered(mx.array([[-mx.inf, 0.0, -mx.inf]]), SamplingParams(top_k=2, top_p=0.5))
    assert np.flatnonzero(np.isfinite(np.array(only[0]))).tolist() == [1]


def draws(seed: int, row: int, count: int = 40) -> list[int]:
    sampler = SeededSampler(SamplingParams(), seed, row)
    return [int(sampler(logprobs(0.25, 0.25, 0.25, 0.25)).item()) for _ in range(count)]


def test_a_seed_repeats_and_rows_differ() -> None:
    assert draws(7, 0) == draws(7, 0)
    assert draws(7, 0) != draws(7, 1)
    assert draws(7, 1) != draws(8, 0)
    assert draws(-(2**63), 0) == draws(-(2**63), 0)


def test_draws_follow_the_distribution() -> None:
    sampler = SeededSampler(SamplingParams(temperature=1.0), 3, 0)
    drawn = [int(sampler(logprobs(0.7, 0.2, 0.1)).item()) for _ in range(2000)]
    assert np.bincount(drawn, minlength=3) / 2000 == pytest.approx([0.7, 0.2, 0.1], abs=0.04)
