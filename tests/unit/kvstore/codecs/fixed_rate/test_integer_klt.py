"""Integers cost little against floats, and sums of them are exact."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.fixed_rate.fixed_rate import gain_steps
from kvstore.codecs.fixed_rate.rate_integers import SizeCounts, gauss_levels, integers_of
from kvstore.codecs.reader import Reader
from kvstore.codecs.rows.lloyd_max import gauss_error
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.gain import OctaveGain, steps_of
from kvstore.codecs.stages.integer_klt import IntegerKlt, IntegerLevels, input_scale
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


def test_products_stay_within_the_exact_range_of_fp32_and_int32():
    for width in (16, 80, 192, 256):
        assert width * 127 * 127 < 1 << 24
        assert 32000 * input_scale(width) * np.sqrt(width) * 1.05 < 1 << 31
        assert input_scale(width) * np.sqrt(width) * 1.05 < 32767


def test_gain_steps_are_nearest():
    sizes = np.exp2(np.linspace(-20, 20, 4001)).astype(np.float32)
    steps = 16 * np.log2(sizes.astype(np.float64))
    assert np.abs(steps_of(sizes) - steps).max() < 0.5001


def gain_of(steps):
    (shape,) = stack_shapes(Scope("head"), layout_of(16))
    return OctaveGain(shape, np.tile(np.array(steps, np.int16), (4, 1)))


def rows_of(sizes):
    return np.tile(np.array(sizes, np.float32)[None, :, None], (4, 1, 16))


def test_a_gain_takes_four_bits_and_comes_back():
    gain = gain_of(range(-64, 64, 8))
    for num_tokens in (1, 8, 9):
        rows = uneven((4, num_tokens, 16))
        gains, kept = gain.measure(rows)
        written = gain.write(gains)
        assert not kept.any() and len(written) == gain.nbytes(num_tokens) == 4 * -(-num_tokens // 2)
        assert np.array_equal(gain.read(Reader(memoryview(written)), num_tokens), gains)
        octaves = np.log2(np.sqrt(np.mean(rows**2, axis=2)) / gains[:, :, 0])
        assert np.abs(octaves).max() < 0.29  # half of the distance between two, and half a step


def test_sizes_between_distant_gains_get_the_larger_one():
    gain = gain_of([-160, *range(0, 112, 8), 240])
    gains, kept = gain.measure(rows_of([2.0**-12, 2.0**-9.8, 2.0**-6, 2.0**6.6, 2.0**7.2]))
    assert not kept.any()
    assert np.log2(gains[0, :, 0]).tolist() == [-10, -10, 0, 6.5, 15]


def test_rows_that_are_too_large_are_kept_and_empty_ones_get_the_smallest_gain():
    gain = gain_of(range(-64, 64, 8))
    gains, kept = gain.measure(rows_of([0, 1, 2.0**3.7, 2.0**3.9, np.inf, np.nan]))
    assert kept[0, :, 0].tolist() == [False, False, False, True, True, True]
    assert np.log2(gains[0, 0, 0]) == -4


def test_learned_gains_reach_over_all_that_was_seen():
    octaves = np.random.default_rng(0).normal(3, 0.3, (2, 4000))
    octaves[0, 5], octaves[1, 7] = 7, -2
    steps = gain_steps(octaves)
    assert np.all(np.diff(steps, axis=1) >= 0)
    assert steps[0, -3:].tolist() == [120, 136, 184] and steps[1, 0] == -32
    near = np.abs(steps - 48) < 16
    assert near.sum(axis=1).min() >= 8


def test_levels_fit_the_values_that_were_seen():
    rng = np.random.default_rng(0)
    bits = np.array([[3] * 8, [2] * 8])
    values = rng.laplace(size=(2, 4000, 8)) / np.sqrt(2)
    counts = SizeCounts(bits)
    counts.add(values)
    fitted, normal = counts.levels(), gauss_levels(2)
    for unit, size in ((0, 4), (1, 2)):
        errors = []
        for levels in (fitted, normal):
            table = levels[unit, bits[unit, 0], :size]
            sizes = np.abs(values[unit])
            codes = np.searchsorted((table[1:] + table[:-1]) / 2, sizes)
            errors.append(np.mean((table[codes] - sizes) ** 2))
        assert errors[0] < 0.93 * errors[1]
    assert np.array_equal(fitted[0, 2], normal[0, 2])  # nothing was seen of those
