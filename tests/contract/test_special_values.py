"""Rows that are no numbers: every codec keeps them as they are, in every dtype of a cache."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvstore.codecs import floats
from kvstore.codecs.base import Codec
from kvstore.codecs.presets import open_codec
from kvstore.shapes import DType, KVPair
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run

PRESETS = ("raw", "tq3", "tq4", "lm3", "dense3", "balanced", "max", "safe")
DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")
# The bits of a value of 16 bits: bf16's, and of fp32 its upper half; fp16's.
SPECIAL = {
    "infinity": (0x7F80, 0x7C00),
    "minus infinity": (0xFF80, 0xFC00),
    "not a number": (0x7FC0, 0x7E00),
    "not a number, with a sign and more": (0xFFD5, 0xFF55),
    "not a number, signalling": (0x7F81, 0x7C01),
}
NUM_TOKENS, FIRST_TOKEN = 40, 128
TOKENS = range(20, 20 + 2 * len(SPECIAL))  # that have one, in turn in a key and in a value


@functools.cache
def codec_of(preset: str, dtype: DType) -> Codec:
    return open_codec(preset, model_profile(dtype))


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32 if array.itemsize == 4 else np.uint16)


def with_special(run: list[KVPair], dtype: DType) -> None:
    for (brain, half), token in zip(SPECIAL.values(), TOKENS[::2], strict=True):
        pattern = half if dtype == "float16" else brain << 16 if dtype == "float32" else brain
        for side in (0, 1):
            bits_of(run[1][side])[1, token + side, 3] = pattern


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_they_come_back_bit_for_bit_beside_numbers(preset: str, dtype: DType) -> None:
    codec, layout = codec_of(preset, dtype), model_layout(dtype)
    run, out = model_run(layout, NUM_TOKENS, first_token=FIRST_TOKEN), layout.empty(NUM_TOKENS)
    with_special(run, dtype)
    payload = codec.encode(run, layout, FIRST_TOKEN)
    codec.decode(memoryview(payload), layout, FIRST_TOKEN, out)
    for token in TOKENS:
        row, restored = (x[1][token % 2][1, token] for x in (run, out))
        if not codec.exact:  # an fp32 cache is kept in bf16, whose not-a-numbers are quiet
            row = floats.from_stored(floats.to_stored(row, dtype), dtype)
        assert bits_of(restored).tobytes() == bits_of(row).tobytes()
    for array in (x for pair in out for x in pair):
        others = np.delete(array, TOKENS, axis=1)
        assert np.isfinite(floats.widen(floats.to_stored(others, dtype), dtype)).all()
