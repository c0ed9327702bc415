"""Matrices with bits dealt over rows: bytes that never change, the best deal, sizes that fit."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.session_codec import matrix_codec_of
from kvstore.codecs.states import (
    FEWEST,
    MOST,
    DealtCodec,
    dealt_bits,
    dealt_codec,
    matrix_codec,
    relative_peaks,
)
from kvstore.errors import Corrupt, UnknownCodec
from tests.unit.kvstore.codecs.states.test_matrices import DTYPES, plain, state, stored

GOLDEN = "557f5a39f7fabef9"
ROWS = 18  # of ``state``
WEIGHTS = np.exp2(np.arange(ROWS, dtype=np.float32) - 4)


def codec_of(level: float = 0.5, weights: np.ndarray = WEIGHTS) -> DealtCodec:
    return DealtCodec("dealt6", "0123456789", [weights], level)


def back(payload: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The matrices that an engine reads which knows nothing of the model."""
    reader = matrix_codec_of(codec_of().id)
    return plain(reader.decode(memoryview(payload), dtype, shape), dtype)


def test_the_bytes_are_these():
    payload = codec_of().encode(state(), "float32")
    assert len({*payload[:ROWS]}) > 4, "rows have many numbers of bits"
    assert blake2b(payload, digest_size=8).hexdigest() == GOLDEN


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1 << 20), level=st.floats(1e-12, 1e6))
def test_every_value_comes_back_within_half_a_step_of_its_row(dtype: str, seed: int, level: float):
    array = stored(np.clip(state(seed), -60000, 60000), dtype)
    payload = codec_of(level).encode(array, dtype)
    bits = np.frombuffer(payload, np.uint8, ROWS).reshape(array.shape[:-1])
    exact = plain(array, dtype)
    assert (bits[~exact.any(-1)] == 0).all()
    assert set(bits[exact.any(-1)]) <= {*range(FEWEST, MOST + 1)}
    largest = np.abs(exact).max(-1, keepdims=True)
    steps = 2.0 ** (np.maximum(bits, FEWEST) - 1)[..., None] - 1
    tiny = 2.0**-24 if dtype == "float16" else 2.0**-126
    allowed = largest * (0.5 * 1.01 / steps + 2.0**-8) + 128 * tiny
    assert (np.abs(back(payload, dtype, array.shape) - exact) <= allowed).all()


@given(costs=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=12), level=st.floats(1e-9, 1e3))
def test_no_bit_is_better_placed_elsewhere(costs: list[float], level: float):
    known = np.array(costs)
    bits = dealt_bits(known, level).astype(int)
    errors = [c * (2.0 ** (np.arange(FEWEST - 1, MOST)) - 1) ** -2 for c in known]
    for giver, own in enumerate(bits):
        for taker, other in enumerate(bits):
            if giver != taker and own > FEWEST and other < MOST:
                lost = errors[giver][own - FEWEST - 1] - errors[giver][own - FEWEST]
                won = errors[taker][other - FEWEST] - errors[taker][other - FEWEST + 1]
                assert won <= lost * (1 + 1e-9)


def test_peaks_are_relative_to_the_size_of_their_matrix():
    values = np.array([[2, 0], [0, 0], [200, 0], [0, 0]], np.float32)
    assert relative_peaks(values, 2) == pytest.approx([4, 0, 4, 0])
    assert relative_peaks(np.zeros((2, 3), np.float32), 2) == pytest.approx([0, 0])


@pytest.mark.parametrize(("number", "weights"), [(1, WEIGHTS), (0, WEIGHTS[1:])])
def test_an_array_that_was_not_seen_has_eight_bits(number: int, weights: np.ndarray):
    payload = codec_of(weights=weights).encode(state(), "float32", number)
    same = matrix_codec("state8")
    expected = same.decode(memoryview(same.encode(state(), "float32")), "float32", state().shape)
    assert (back(payload, "float32", state().shape) == expected).all()


def test_no_prefix_and_no_other_shape_is_read():
    codec, array = codec_of(), state()
    payload = codec.encode(array, "float32")
    for length in (0, 1, ROWS, len(payload) - 1):
        with pytest.raises(Corrupt):
            codec.decode(memoryview(payload[:length]), "float32", array.shape)
    for shape in ((), (0, 13), (-1, 13), (1 << 40, 1 << 20), (1, 2, 9, 21)):
        with pytest.raises(Corrupt):
            codec.decode(memoryview(payload), "float32", shape)
    with pytest.raises(Corrupt):
        codec.decode(memoryview(payload), "int32", array.shape)


@pytest.mark.parametrize("bits", [1, 9, 255])
def test_bits_that_no_encoder_writes_are_refused(bits: int):
    payload = bytearray(codec_of().encode(state(), "float32"))
    payload[3] = bits
    with pytest.raises(Corrupt):
        codec_of().decode(memoryview(payload), "float32", state().shape)


def test_arrays_that_another_release_learned_are_refused():
    known = {"weights0": WEIGHTS, "levels": np.ones(3, np.float32)}
    assert dealt_codec("dealt5", known, "ab").id == "dealt5.1-ab"
    for wrong in (
        {"weights0": WEIGHTS},
        {"weights1": WEIGHTS, "levels": np.ones(3, np.float32)},
        {"weights0": WEIGHTS.astype(np.int32), "levels": np.ones(3, np.float32)},
        {"weights0": WEIGHTS, "levels": np.ones(1, np.float32)},
    ):
        with pytest.raises(UnknownCodec, match="another release"):
            dealt_codec("dealt5", wrong, "ab")
