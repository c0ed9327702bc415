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
from kvstore.codecs.states import FEWEST, MOST, DealtCodec, dealt_bits, dealt_codec, matrix_codec
from kvstore.errors import Corrupt, UnknownCodec

GOLDEN = {
    "state16": "a72389620a50df05",
    "state8": "64a7a4ab73e08d4e",
    "state6": "5d5bfbf0514e2e13",
    "state4": "06bcdc6e8a256556",
    "dealt6": "557f5a39f7fabef9",
}
PLAIN = [name for name, entry in STATES.items() if not entry.learns]
DTYPES = ("float32", "bfloat16", "float16")
SHAPE, ROWS = (1, 2, 9, 13), 18
WEIGHTS = np.exp2(np.arange(ROWS, dtype=np.float32) - 4)


def dealt(level: float = 0.5, weights: np.ndarray = WEIGHTS) -> DealtCodec:
    """Its bits are dealt over rows as they weigh."""
    return DealtCodec("dealt6", "0123456789", [weights], level)


CODECS = {name: matrix_codec(name) for name in PLAIN} | {"dealt6": dealt()}
every_codec = pytest.mark.parametrize("name", CODECS)


def state(seed: int = 1) -> np.ndarray:
    """Rows of very different sizes, one of zeros."""
    rng = np.random.default_rng(seed)
    scales = np.exp2(rng.integers(-20, 20, (*SHAPE[:-1], 1)).astype(np.float32))
    values = (rng.integers(-4096, 4096, SHAPE) / 4096).astype(np.float32) * scales
    values[..., 0, :] = 0
    return values


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return round_to_bf16(values)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def plain(array: np.ndarray, dtype: str) -> np.ndarray:
    return widen(array, "bfloat16") if dtype == "bfloat16" else array.astype(np.float32)


def back(payload: bytes, codec_id: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The matrices that an engine reads which knows nothing of the model."""
    return plain(matrix_codec_of(codec_id).decode(memoryview(payload), dtype, shape), dtype)


def assert_near(found: np.ndarray, exact: np.ndarray, bits: np.ndarray | int, dtype: str) -> None:
    """Half a step of its row, a scale that was rounded up, and the engine's own rounding."""
    largest = np.abs(exact).max(-1, keepdims=True)
    allowed = largest * (0.5 * 1.01 / (2.0 ** (bits - 1) - 1) + 2.0**-8)
    tiny = 2.0**-24 if dtype == "float16" else 2.0**-126  # the smallest steps there are
    assert (np.abs(found - exact) <= allowed + 128 * tiny).all()


@every_codec
def test_the_bytes_are_these(name: str) -> None:
    payload = CODECS[name].encode(state(), "float32")
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
def test_every_value_comes_back_within_half_a_step(
    name: str, dtype: str, values: np.ndarray
) -> None:
    codec, array = matrix_codec(name), stored(values, dtype)
    assert codec.takes(array, dtype)
    payload = codec.encode(array, dtype)
    assert len(payload) == codec.nbytes(array.size // array.shape[-1], array.shape[-1])
    assert payload == codec.encode(array.copy(), dtype)
    found, exact = back(payload, codec.id, dtype, array.shape), plain(array, dtype)
    if name == "state16":
        assert (np.abs(found - exact) <= np.abs(exact) * 2.0**-8 + 2.0**-17).all()
    else:
        assert_near(found, exact, codec.num_bits, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1 << 20), level=st.floats(1e-12, 1e6))
def test_every_value_comes_back_within_half_a_step_of_its_row(dtype: str, seed: int, level: float):
    array, codec = stored(np.clip(state(seed), -60000, 60000), dtype), dealt(level)
    payload, exact = codec.encode(array, dtype), plain(array, dtype)
    bits = np.frombuffer(payload, np.uint8, ROWS).reshape(array.shape[:-1])
    assert (bits[~exact.any(-1)] == 0).all()
    assert set(bits[exact.any(-1)]) <= {*range(FEWEST, MOST + 1)}
    found = back(payload, codec.id, dtype, array.shape)
    assert_near(found, exact, np.maximum(bits, FEWEST)[..., None].astype(int), dtype)


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


@pytest.mark.parametrize(("number", "weights"), [(1, WEIGHTS), (0, WEIGHTS[1:])])
def test_an_array_that_was_not_seen_has_eight_bits(number: int, weights: np.ndarray):
    codec, same = dealt(weights=weights), matrix_codec("state8")
    payload, expected = codec.encode(state(), "float32", number), same.encode(state(), "float32")
    found = back(payload, codec.id, "float32", SHAPE)
    assert (found == back(expected, same.id, "float32", SHAPE)).all()


@every_codec
def test_no_prefix_and_no_other_shape_is_read(name: str) -> None:
    codec = CODECS[name]
    payload = codec.encode(state(), "float32")
    wrong = [(payload[:length], SHAPE) for length in (0, 1, ROWS, len(payload) - 1)]
    shapes = ((), (0, 13), (-1, 13), (1 << 40, 1 << 20), (2, 9, 17), (1, 2, 9, 21))
    wrong += [(payload, shape) for shape in shapes]
    for part, shape in wrong:
        with pytest.raises(Corrupt):
            codec.decode(memoryview(part), "float32", shape)
    with pytest.raises(Corrupt):
        codec.decode(memoryview(payload), "int32", SHAPE)


@pytest.mark.parametrize("bits", [1, 9, 255])
def test_bits_that_no_encoder_writes_are_refused(bits: int):
    payload = bytearray(dealt().encode(state(), "float32"))
    payload[3] = bits
    with pytest.raises(Corrupt):
        dealt().decode(memoryview(payload), "float32", SHAPE)


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


def test_names_and_ids() -> None:
    for name in PLAIN:
        assert matrix_codec_of(matrix_codec(name).id) == matrix_codec(name)
    others = ("state8", ".1", "", "state8.1-ab", "dealt6.1", "dealt6.2-ab")
    for wrong in ("state5.1", "state8.2", *others):
        with pytest.raises(UnknownCodec):
            matrix_codec_of(wrong)
    with pytest.raises(UnknownCodec):
        matrix_codec("state5")


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
