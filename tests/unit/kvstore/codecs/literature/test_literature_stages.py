from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.literature.eight_bits import (
    LARGEST,
    BlockScale,
    Float8,
    TensorScale,
    float8_values,
)
from kvstore.codecs.literature.groups import MinMaxGroups, Rounded
from kvstore.codecs.literature.seeds import Digits, Levels, laplace_levels
from kvstore.codecs.literature.stages.levels import LloydMax, SignHadamard
from kvstore.codecs.reader import Reader
from kvstore.codecs.rows.lloyd_max import gauss_error
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.errors import Corrupt, UnknownCodec
from tests.unit.kvstore.codecs.samples import layout_of, shape_of, uneven


def test_the_rotation_keeps_lengths_and_evens_channels_out():
    stack = uneven((4, 200, 64))
    rotated, _ = SignHadamard(shape_of(64)).forward(stack, 0)
    assert np.allclose(np.linalg.norm(rotated, axis=2), np.linalg.norm(stack, axis=2), rtol=1e-4)
    sizes = np.sqrt((rotated**2).mean(axis=(0, 1)))
    assert sizes.max() / sizes.min() < 2
    with pytest.raises(UnknownCodec):
        SignHadamard(shape_of(50))


@pytest.mark.parametrize("along", ["tokens", "width"])
def test_groups_come_back_within_half_a_step(along):
    stack = uneven((4, 50, 32))
    groups, rounded = MinMaxGroups(shape_of(32), 4, 32, along), Rounded(4)
    mapped, note = groups.forward(stack, 0)
    assert len(note) == groups.note_nbytes(50)
    lows, steps = groups.read(Reader(memoryview(note)), 50)
    restored = groups.backward(rounded.restore(rounded.quantise(mapped)), 0, (lows, steps))
    assert np.abs(restored - stack).max() <= steps.max() * 0.6


def test_groups_refuse_bounds_that_are_no_numbers():
    groups = MinMaxGroups(shape_of(32), 4, 32, "width")
    note = np.full(groups.note_nbytes(3) // 2, np.inf, "<f2").tobytes()
    with pytest.raises(Corrupt):
        groups.read(Reader(memoryview(note)), 3)


def test_float8_is_the_nearest_of_its_values_and_even_between_two():
    values = float8_values()
    positive = values[:127].astype(np.float64)
    assert np.all(np.diff(positive) > 0) and positive[-1] == LARGEST == 448
    assert (positive[1], positive[8], positive[9]) == (2.0**-9, 2.0**-6, 2.0**-6 * 1.125)
    middles = (positive[1:] + positive[:-1]) / 2
    exact = np.concatenate([positive, middles, middles * 1.001, middles * 0.999, [1e4]])
    exact = np.concatenate([exact, -exact]).astype(np.float32)
    distances = np.abs(exact[:, None].astype(np.float64) - values[None, :].astype(np.float64))
    codes = Float8().quantise(exact)
    found = distances[np.arange(len(exact)), codes]
    assert np.array_equal(found, distances.min(axis=1))
    assert np.all(codes[127 : 127 + len(middles)] % 2 == 0)


def test_a_tensor_has_one_scale_for_all_its_heads():
    layout = layout_of(32, num_heads=2, num_layers=2)
    (shape,) = stack_shapes(Scope("head"), layout)
    scaled, stack = TensorScale(shape), uneven((shape.num_units, 9, 32))
    mapped, note = scaled.forward(stack.copy(), 0)
    assert len(note) == scaled.note_nbytes(9) == 4 * 4  # K and V of two layers
    assert np.sum(np.abs(mapped).max(axis=(1, 2)) > LARGEST - 0.001) == 4
    restored = scaled.backward(mapped, 0, scaled.read(Reader(memoryview(note)), 9))
    assert np.allclose(restored, stack, rtol=1e-6)
    for scale in (0.0, np.inf):
        with pytest.raises(Corrupt):
            scaled.read(Reader(memoryview(np.full(4, scale, "<f4").tobytes())), 9)


@pytest.mark.parametrize("width", [32, 48, 80])
def test_blocks_come_back_within_half_a_step(width):
    stack = uneven((4, 50, width))
    blocks, rounded = BlockScale(shape_of(width)), Rounded(8)
    mapped, note = blocks.forward(stack, 0)
    assert len(note) == blocks.note_nbytes(50)
    scales = blocks.read(Reader(memoryview(note)), 50)
    restored = blocks.backward(rounded.restore(rounded.quantise(mapped)), 0, scales)
    steps = np.repeat(scales, 32, axis=2)[:, :, :width]
    assert np.all(np.abs(restored - stack) <= steps * 0.57)  # fp16 scales cut off a little
    assert not blocks.backward(np.full_like(mapped, 128), 0, scales).any()
    with pytest.raises(Corrupt):
        blocks.read(Reader(memoryview(bytes([0, 124]) * (len(note) // 2))), 50)


def test_lloyd_max_reaches_the_error_of_its_tables():
    num_levels = np.array([[1, 2, 3, 8, 11, 16, 64, 256]])
    deviations = np.array([[1, 5, 0.1, 1, 2, 3, 4, 100]], np.float32)
    quantiser = LloydMax(num_levels, deviations)
    exact = np.random.default_rng(0).standard_normal((1, 40_000, 8)).astype(np.float32) * deviations
    restored = quantiser.restore(quantiser.quantise(exact))
    errors = ((exact - restored) ** 2).mean(axis=(0, 1)) / deviations[0] ** 2
    assert errors == pytest.approx([gauss_error(int(n)) for n in num_levels[0]], rel=0.06)
    assert np.isfinite(quantiser.restore(np.full((1, 3, 8), 255, np.uint8))).all()


def test_levels_of_a_laplacian_variable_are_the_known_ones():
    """Each is the mean of its cell; for eight levels as in tables of Lloyd-Max quantisers."""
    assert laplace_levels(2) == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-15)
    assert laplace_levels(4)[2:] == pytest.approx([0.420, 1.834], abs=1e-3)
    levels = laplace_levels(8)
    assert levels[4:] == pytest.approx([0.233, 0.833, 1.673, 3.087], abs=1e-3)
    exact = np.random.default_rng(0).laplace(0, 0.5**0.5, 400_000).astype(np.float32)
    codes = Levels(levels).quantise(exact)
    means = [exact[codes == code].mean() for code in range(8)]
    assert means == pytest.approx(levels, abs=0.02)


@given(st.integers(1, 150), st.sampled_from([0, 1, 5, 300]), st.integers(0, 2**32))
def test_digits_come_back(width, num_tokens, seed):
    (shape,) = stack_shapes(Scope("head"), layout_of(width, num_heads=1))
    coder = Digits(shape)
    codes = np.random.default_rng(seed).integers(0, 11, (2, num_tokens, width)).astype(np.uint8)
    packed = coder.write(codes)
    assert len(packed) == coder.nbytes(num_tokens)
    assert np.array_equal(coder.read(Reader(memoryview(packed)), num_tokens), codes)


@pytest.mark.parametrize("width", [1, 37, 64, 96, 128])
def test_digits_are_those_of_whole_numbers_also_of_bytes_that_were_never_written(width):
    (shape,) = stack_shapes(Scope("head"), layout_of(width, num_heads=1))
    coder, rng = Digits(shape), np.random.default_rng(width)
    packed = rng.integers(0, 256, (2, 26, coder.nbytes_of_row)).astype(np.uint8)
    packed[0, :3] = 255
    found = coder.read(Reader(memoryview(packed.reshape(-1))), 26).reshape(52, width)
    for row, codes in zip(packed.reshape(52, -1), found, strict=True):
        for number, first in enumerate(range(0, width, 37)):
            whole = int.from_bytes(row[16 * number : 16 * number + 16].tobytes(), "little")
            right = [whole // 11**k % 11 for k in range(min(37, width - first))]
            assert codes[first : first + 37].tolist() == right
