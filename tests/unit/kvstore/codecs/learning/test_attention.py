"""The derivative of a layer's attention, against differences of its outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.codecs.learning.attention import Attention, gradients, outputs

HEADS, KV_HEADS, TOKENS, QUERIES, KNOWN, DIM, VALUE_DIM = 6, 2, 11, 4, 7, 5, 3
PLAIN = Attention(scale=0.6)
RNG = np.random.default_rng(3)
KINDS = {
    "grouped heads": PLAIN,
    "a window": replace(PLAIN, window=6),
    "a soft cap": replace(PLAIN, soft_cap=1.5),
    "sinks": replace(PLAIN, sinks=RNG.normal(size=HEADS)),
    "slopes": replace(PLAIN, slopes=np.linspace(0.05, 0.4, HEADS)),
    "all of them": Attention(
        0.6, 6, 1.5, RNG.normal(size=HEADS), slopes=np.linspace(0.05, 0.4, HEADS)
    ),
}


def _arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return (
        rng.normal(size=(HEADS, QUERIES, DIM)).astype(np.float32),
        rng.normal(size=(KV_HEADS, TOKENS, DIM)).astype(np.float32),
        rng.normal(size=(KV_HEADS, TOKENS, VALUE_DIM)).astype(np.float32),
        rng.normal(size=(2, HEADS, QUERIES, VALUE_DIM)).astype(np.float32),
    )


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_gradients_are_those_of_finite_differences(how: Attention) -> None:
    queries, keys, values, cotangents = _arrays()
    found = gradients(how, queries, keys, values, cotangents, KNOWN)
    assert [x.shape for x in found] == [
        (2, KV_HEADS, KNOWN, DIM),
        (2, KV_HEADS, KNOWN, VALUE_DIM),
    ]

    def total(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.einsum("dhqv,hqv->d", cotangents, outputs(how, queries, k, v), dtype=np.float64)

    step = 1e-2
    for side, array in enumerate((keys, values)):
        for place in np.ndindex(KV_HEADS, KNOWN, array.shape[2]):
            pair = []
            for sign in (1, -1):
                moved = array.copy()
                moved[place] += sign * step
                pair.append(total(moved, values) if side == 0 else total(keys, moved))
            slope = (pair[0] - pair[1]) / (2 * step)
            np.testing.assert_allclose(found[side][(slice(None), *place)], slope, atol=4e-3)
