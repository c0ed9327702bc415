"""Matrices of recurrent states: bytes that never change, bounded errors, sizes that fit."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from kvstore.codecs.catalogue import STATES
from kvstore.codecs.floats import round_to_bf16, widen
from kvstore.codecs.session_codec import matrix_codec_of
from kvstore.codecs.states import MatrixCodec, matrix_codec
from kvstore.errors import Corrupt, UnknownCodec

GOLDEN = {
    "state16": "a72389620a50df05",
    "state8": "64a7a4ab73e08d4e",
    "state6": "5d5bfbf0514e2e13",
    "state4": "06bcdc6e8a256556",
}
PLAIN = [name for name, entry in STATES.items() if not entry.learns]
DTYPES = ("float32", "bfloat16", "float16")


def state(seed: int = 1, shape: tuple[int, ...] = (1, 2, 9, 13)) -> np.ndarray:
    """Rows of very different sizes, one of zeros."""
    rng = np.random.default_rng(seed)
    scales = np.exp2(rng.integers(-20, 20, (*shape[:-1], 1)).astype(np.float32))
    values = (rng.integers(-4096, 4096, shape) / 4096).astype(np.float32) * scales
    values[..., 0, :] = 0
    return values


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return round_to_bf16(values)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def plain(array: np.ndarray, dtype: str) -> np.ndarray:
    return widen(array, "bfloat16") if dtype == "bfloat16" else array.astype(np.float32)


def back(codec: MatrixCodec, array: np.ndarray, dtype: str) -> np.ndarray:
    return codec.decode(memoryview(codec.encode(array, dtype)), dtype, array.shape)


@pytest.mark.parametrize("name", PLAIN)
def test_the_bytes_are_these(name: str) -> None:
    payload = matrix_codec(name).encode(state(), "float32")
    assert blake2b(payload, digest_size=8).hexdigest() == GOLDEN[name]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    values=npst.arrays(
        np.float32,
        npst.array_shapes(min_dims=1, max_dims=4, max_side=11),
        elements=st.floats(-60000, 60000, width=32),
    )
)
def test_every_value_comes_back_within_half_a_step_of_its_row(
    name: str, dtype: str, values: np.ndarray
) -> None:
    codec, array = matrix_codec(name), stored(values, dtype)
    assert codec.takes(array, dtype)
    payload = codec.encode(array, dtype)
    rows = array.size // array.shape[-1]
    assert len(payload) == codec.nbytes(rows, array.shape[-1])
    assert payload == codec.encode(array.copy(), dtype)
    found = plain(codec.decode(memoryview(payload), dtype, array.shape), dtype)
    exact = plain(array, dtype)
    largest = np.abs(exact).max(-1, keepdims=True)
    if name == "state16":
        allowed = np.abs(exact) * 2.0**-8
    else:
        # Half a step, a scale that was rounded up, and the engine's own rounding.
        allowed = largest * (0.5 * 1.01 / (2 ** (codec.num_bits - 1) - 1) + 2.0**-8)
    tiny = 2.0**-24 if dtype == "float16" else 2.0**-126  # the smallest steps there are
    assert (np.abs(found - exact) <= allowed + 128 * tiny).all()


@pytest.mark.parametrize("name", PLAIN)
def test_no_prefix_and_no_other_shape_is_read(name: str) -> None:
    codec, array = matrix_codec(name), state()
    payload = codec.encode(array, "float32")
    for length in (0, 1, len(payload) - 1):
        with pytest.raises(Corrupt):
            codec.decode(memoryview(payload[:length]), "float32", array.shape)
    for shape in ((), (0, 13), (-1, 13), (1 << 40, 1 << 20), (2, 9, 17)):
        with pytest.raises(Corrupt):
            codec.decode(memoryview(payload), "float32", shape)
    with pytest.raises(Corrupt):
        codec.decode(memoryview(payload), "int32", array.shape)


def test_a_scale_that_no_encoder_writes_is_refused() -> None:
    codec = matrix_codec("state8")
    payload = bytearray(codec.encode(np.ones((1, 4), np.float32), "float32"))
    payload[:2] = b"\x80\x7f"  # infinity
    with pytest.raises(Corrupt):
        codec.decode(memoryview(payload), "float32", (1, 4))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_state_that_is_not_finite_is_left_alone(bad: float) -> None:
    array = np.full((3, 4), bad, np.float32)
    assert not matrix_codec("state8").takes(array, "float32")
    assert not matrix_codec("").takes(np.ones((3, 4), np.float32), "float32")
    assert not matrix_codec("state8").takes(np.ones((3, 4), np.int32), "int32")


def test_fewer_bits_cost_more() -> None:
    array = state()
    found = [back(matrix_codec(x), array, "float32") for x in PLAIN]
    errors = [float(np.square(x - array).sum()) for x in found]
    assert errors == sorted(errors) and errors[0] < errors[-1]


def test_names_and_ids() -> None:
    for name in PLAIN:
        assert matrix_codec_of(matrix_codec(name).id) == matrix_codec(name)
    others = ("state8", ".1", "", "state8.1-ab", "dealt6.1", "dealt6.2-ab")
    for wrong in ("state5.1", "state8.2", *others):
        with pytest.raises(UnknownCodec):
            matrix_codec_of(wrong)
    with pytest.raises(UnknownCodec):
        matrix_codec("state5")
