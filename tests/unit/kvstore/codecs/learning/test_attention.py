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


def test_a_token_outside_of_every_window_has_no_gradient() -> None:
    queries, keys, values, cotangents = _arrays()
    by_keys, by_values = gradients(KINDS["a window"], queries, keys, values, cotangents, KNOWN)
    first = TOKENS - QUERIES - 6 + 1  # seen by the first query
    assert not by_keys[:, :, :first].any() and not by_values[:, :, :first].any()
    assert by_keys[:, :, first:].all() and by_values[:, :, first:].all()


def test_bias_of_queries_and_keys_is_in_the_stored_arrays() -> None:
    """A bias is a part of the queries and keys that are seen, so it changes the gradients."""
    queries, keys, values, cotangents = _arrays()
    bias = np.float32(0.3)
    with_bias = gradients(PLAIN, queries + bias, keys + bias, values, cotangents, KNOWN)
    without = gradients(PLAIN, queries, keys, values, cotangents, KNOWN)
    moved = outputs(PLAIN, queries + bias, keys + bias, values)
    assert not np.allclose(moved, outputs(PLAIN, queries, keys, values), atol=1e-3)
    assert not np.allclose(with_bias[0], without[0], atol=1e-3)
