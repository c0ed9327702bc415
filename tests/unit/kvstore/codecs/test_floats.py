from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import floats

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def test_every_bf16_survives_widening_and_rounding():
    values = floats.widen(ALL_HALVES, "bfloat16")
    again = floats.round_to_bf16(values)
    not_nan = ~np.isnan(values)
    assert np.array_equal(again[not_nan], ALL_HALVES[not_nan])
    assert np.isnan(floats.widen(again[~not_nan], "bfloat16")).all()


@given(st.integers(0, (1 << 32) - 1))
def test_bf16_rounding_takes_the_nearest_and_never_loses_a_nan(bits):
    value = np.array([bits], np.uint32).view(np.float32)
    rounded = floats.widen(floats.round_to_bf16(value), "bfloat16")
    if np.isnan(value[0]):
        assert np.isnan(rounded[0])
        return
    truncated = np.uint32(bits & 0xFFFF0000)
    neighbours = np.array([truncated, truncated + np.uint32(0x10000)], np.uint32)
    distance = np.abs(neighbours.astype(np.int64) - bits)
    assert rounded.view(np.uint32)[0] in neighbours[distance == distance.min()]


def test_a_tie_goes_to_the_even_neighbour():
    ties = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert floats.round_to_bf16(ties).tolist() == [0x3F80, 0x3F82]


def test_scales_are_exactly_the_normal_fp16():
    halves = ALL_HALVES.view(np.float16)
    with np.errstate(all="ignore"):
        written = floats.round_to_normal_fp16(halves.astype(np.float32))
    normal = (halves >= np.finfo(np.float16).tiny) & np.isfinite(halves)
    assert np.array_equal(written, np.where(normal, ALL_HALVES, 0))
    assert np.array_equal(floats.is_normal_fp16(ALL_HALVES), normal)
    widened = floats.widen_normal_fp16(ALL_HALVES[normal])
    assert np.array_equal(widened, halves[normal].astype(np.float32))


@given(st.floats(float(np.finfo(np.float16).tiny), 65000, width=32))
def test_scales_round_as_numpy_does(value):
    array = np.array([value], np.float32)
    assert floats.round_to_normal_fp16(array) == array.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("beyond", [65520.0, np.inf, 6.1e-5, 0.0, -1.0, np.nan])
def test_a_value_that_is_no_normal_fp16_becomes_zero(beyond):
    assert floats.round_to_normal_fp16(np.array([beyond], np.float32)) == 0


def test_fp16_results_saturate():
    wide = np.array([1e6, -1e6, 65504, 3.0], np.float32)
    assert floats.narrow(wide, "float16").tolist() == [65504, -65504, 65504, 3]
