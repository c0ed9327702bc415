"""Integers cost little against floats, and sums of them are exact."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.integer_design import integers_of
from kvstore.codecs.lloyd_max import gauss_error, gauss_table
from kvstore.codecs.pieces.integer_klt import IntegerKlt, IntegerLevels, input_scale
from kvstore.codecs.pieces.octave_gain import OctaveGain, squared_sizes, steps_of
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks import Scope, stack_shapes
from kvstore.errors import Corrupt
from tests.unit.kvstore.codecs.samples import layout_of, uneven


def orthonormal(width, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))[0]


@pytest.mark.parametrize("width", [16, 64, 192, 256])
def test_noise_is_about_that_of_levels_in_floats(width):
    rng = np.random.default_rng(1)
    bits = np.sort(rng.integers(0, 7, width))[::-1]
    deviations = np.exp2(bits - 3.0)
    deviations /= np.sqrt(np.mean(deviations**2))
    basis = orthonormal(width)
    known = integers_of(basis[None], basis[None], deviations[None], bits[None])
    klt = IntegerKlt(known["encode"], known["decode"], known["scales"])
    levels = IntegerLevels(*(known[x] for x in ("bits", "bounds", "levels", "units", "rates")))
    components = rng.standard_normal((1, 3000, width)) * deviations
    rows = (components @ basis).astype(np.float32)
    codes = levels.quantise(klt.forward(rows.copy(), 0)[0])
    back = klt.backward(levels.restore(codes), 0, None)
    expected = sum(
        gauss_error(1 << b) * d * d for b, d in zip(bits.tolist(), deviations, strict=True)
    )
    assert np.mean(np.sum((back - rows) ** 2, axis=2)) < 1.2 * expected


def test_products_stay_within_what_fp32_and_int32_hold_exactly():
    for width in (16, 80, 192, 256):
        assert width * 127 * 127 < 1 << 24
        assert 32000 * input_scale(width) * np.sqrt(width) * 1.05 < 1 << 31
        assert input_scale(width) * np.sqrt(width) * 1.05 < 32767


def test_codes_are_in_the_order_of_values():
    bits = np.array([[3, 1]])
    known = integers_of(np.eye(2)[None], np.eye(2)[None], np.ones((1, 2)), bits)
    levels = IntegerLevels(*(known[x] for x in ("bits", "bounds", "levels", "units", "rates")))
    line = np.linspace(-4, 4, 101) / known["rates"][0, :, None]
    codes = levels.quantise(np.rint(line).astype(np.int32).T[None])[0]
    assert np.all(np.diff(codes.astype(int), axis=0) >= 0)
    assert codes.min(axis=0).tolist() == [0, 0] and codes.max(axis=0).tolist() == [7, 1]
    restored = levels.restore(codes[None])[0, :, 0] * known["units"][0, 0]
    assert set(np.abs(restored).round(1)) == {round(x, 1) for x in gauss_table(8).levels}


def test_gain_steps_are_nearest():
    sizes = np.exp2(np.linspace(-20, 20, 4001)).astype(np.float32)
    steps = 16 * np.log2(sizes.astype(np.float64))
    assert np.abs(steps_of(sizes) - steps).max() < 0.5001


def test_sums_of_squares_have_one_order_and_are_right():
    rows = uneven((3, 5, 80))
    assert np.allclose(squared_sizes(rows), np.sum(rows.astype(np.float64) ** 2, axis=2), rtol=1e-6)


def test_a_gain_comes_back_and_code_zero_is_corrupt():
    (shape,) = stack_shapes(Scope("head"), layout_of(16))
    gain = OctaveGain(shape, np.zeros((4, 1)))
    gains, kept = gain.measure(uneven((4, 9, 16)))
    assert not kept.any()
    written = gain.write(gains)
    assert np.array_equal(gain.read(Reader(memoryview(written)), 9), gains)
    with pytest.raises(Corrupt):
        gain.read(Reader(memoryview(b"\0" + written[1:])), 9)
