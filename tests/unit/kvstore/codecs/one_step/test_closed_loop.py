"""Sums are exact, residuals are bounded, and restoring never drifts from packing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.entropy.tables import NUM_CLASSES, classes_of
from kvstore.codecs.one_step.closed_loop import (
    ClosedLoop,
    LoopIntegers,
    encode_norm,
    levels_of,
    most_input,
)
from kvstore.codecs.one_step.loop_learning import Centroids, integers_of
from kvstore.codecs.stacks.stack_shape import stack_shapes
from tests.unit.kvstore.codecs.fixed_rate.integer_models import layout_with
from tests.unit.kvstore.codecs.one_step.step_models import (
    SCOPE,
    STEP,
    USUAL,
    integers_for,
    model_levels,
)

(SHAPE,) = stack_shapes(SCOPE, layout_with(*[(16, 16)] * 8))


def rows_of(num_tokens, seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((shape.num_units, num_tokens, shape.width)).astype(np.float32)


def orthonormal(width, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))[0]


def one_unit(ratios, step, seed=0):
    """The integers of a unit that nothing predicts."""
    width = len(ratios)
    live = ratios[ratios > 0]
    axes = orthonormal(width, seed)[: len(live)]
    sizes = np.sqrt(np.square(axes * live[:, None] * step).sum(axis=0))
    known = (np.zeros((0, width)), (axes / step, axes * step), classes_of(live))
    return integers_of(model_levels(), 0, *known, (sizes, sizes)), axes


@pytest.mark.slow
@pytest.mark.parametrize(("width", "largest"), [(64, 200.0), (384, 30.0), (768, 2.0)])
def test_integers_add_a_few_per_cent_to_the_cost_of_quantising(width, largest):
    step, ratios = 0.05, largest * np.exp2(-9 * np.arange(width) / width)
    ratios[ratios < 0.3] = 0
    integers, axes = one_unit(ratios, step)
    draws = np.random.default_rng(1).laplace(size=(3000, len(axes))) * ratios[: len(axes)]
    rows = (draws / np.sqrt(2) * step) @ axes
    loop = ClosedLoop(integers)
    codes = loop.quantise(rows.astype(np.float32)[None])
    table = model_levels()[integers.classes[0]].astype(np.int32)
    exact = levels_of(codes[0], table) / table[:, 0] * step
    missed = np.square(exact - draws / np.sqrt(2) * step).sum(axis=1).mean()
    more = np.square(loop.restore(codes)[0] - exact @ axes).sum(axis=1).mean()
    assert more < 0.04 * missed


def test_sums_are_those_of_whole_numbers():
    integers = integers_for(SHAPE, [USUAL] * SHAPE.num_units, 100)
    codes = ClosedLoop(integers).quantise(rows_of(2))
    restored = ClosedLoop(integers).restore(codes)
    past: list[int] = []
    for unit in range(SHAPE.num_units):
        wide, others = integers.counts[unit].tolist()
        assert wide and others
        table = integers.levels[integers.classes[unit]].astype(np.int32)
        levels = levels_of(codes[unit, 1], table).tolist()
        totals = []
        for channel in range(SHAPE.width):
            known = integers.known[unit, 100 - len(past) :, channel].tolist()
            total = sum(x * y for x, y in zip(past, known, strict=True))
            total <<= int(integers.up[unit, channel])
            finer = int(integers.finer[unit])
            total = (total << finer) + (1 << finer >> 1)
            total += sum(levels[k] * int(integers.wide[unit, k, channel]) for k in range(wide))
            total >>= finer
            own = integers.own[unit, :, channel].tolist()
            total += sum(levels[wide + k] * own[k] for k in range(others))
            exponent = int(integers.exponents[unit, channel])
            assert restored[unit, 1, channel] == np.float32(total) * np.float32(2.0**exponent)
            totals.append(total)
        shifts = integers.down[unit].tolist()
        rounded = [(x + (1 << k >> 1)) >> k for x, k in zip(totals, shifts, strict=True)]
        past = (past + [max(min(x, 127), -127) for x in rounded])[-100:]


def test_sums_wrap_around_for_codes_that_no_packer_writes():
    (one,) = stack_shapes(SCOPE, layout_with((16, 16)))
    known = integers_for(one, [(700.0, 100.0)])
    loud = {"wide": np.full_like(known.wide, 32767), "finer": np.array([2], np.uint8)}
    alike = {"exponents": np.full_like(known.exponents, -10)}
    integers = dataclasses.replace(known, **loud, **alike)
    codes = np.full((1, 1, integers.classes.shape[1]), 1 << 24, np.int32)
    levels = levels_of(codes[0, 0], integers.levels[integers.classes[0]].astype(np.int32))
    total = (32767 * int(levels.sum()) + 2 + 2**31) % 2**32 - 2**31
    assert abs(32767 * int(levels.sum())) > 2**31
    restored = ClosedLoop(integers).restore(codes)[0, 0]
    assert np.all(restored == np.float32(total >> 2) * np.float32(2.0**-10))


@given(
    st.integers(0, 2 * SHAPE.width),
    st.integers(0, 12),
    st.sampled_from([0.01, 1, 100]),
    st.integers(0, 99),
)
def test_packing_and_restoring_never_drift_apart(reach, up, size, seed):
    """For any prediction, and however rows are rounded or cut."""
    every = integers_for(SHAPE, [(700.0, 1e-3)] * SHAPE.num_units, reach)
    integers = dataclasses.replace(every, up=np.full_like(every.up, up))
    rows, loop = size * rows_of(5, seed), ClosedLoop(integers)
    codes = loop.quantise(rows)
    past, restored = np.zeros((5, 0), np.int8), loop.restore(codes)
    for unit in range(SHAPE.num_units):
        followed = loop.follow(unit, rows[unit], past)
        assert np.array_equal(followed.codes, codes[unit])
        sums = (followed.sums << integers.left[unit]).astype(np.int32)
        floats = sums.astype(np.float32) * integers.scales[unit]
        assert np.array_equal(floats, restored[unit])
        past = loop.joined(past, followed.known)


@pytest.mark.parametrize("reach", [0, 128, 200])
def test_no_error_is_handed_on_to_the_next_unit(reach):
    integers = integers_for(SHAPE, [(700.0, 1e-3)] * SHAPE.num_units, reach)
    rows, loop = rows_of(40), ClosedLoop(integers)
    missed = np.abs(loop.restore(loop.quantise(rows)) - rows).max(axis=(1, 2))
    assert missed.max() < 2 * STEP


@pytest.mark.parametrize("width", [16, 64, 384, 3840])
def test_the_products_of_a_packer_fit_into_32_bits(width):
    rows = np.rint(orthonormal(min(width, 64)) * encode_norm(width))
    longest = np.linalg.norm(rows, axis=1).max() + np.sqrt(width) / 2  # all entries rounded up
    assert longest * most_input(width) * np.sqrt(width) < 2**31
    assert np.abs(rows).max() <= 32767


def test_outliers_are_cut_and_not_wrapped():
    integers = integers_for(SHAPE, [(700.0, 1e-3)] * SHAPE.num_units)
    rows = np.zeros((SHAPE.num_units, 2, SHAPE.width), np.float32)
    rows[:, 0], rows[:, 1, 3] = 1.0, 1e5
    restored = ClosedLoop(integers).restore(ClosedLoop(integers).quantise(rows))
    assert np.all(restored[:, 1, 3] > 0)
    assert np.abs(restored - rows)[:, 0].max() < 3 * STEP


def test_codes_stand_for_centroids():
    table = np.array([10, -1, 0, 2], np.int32)
    codes = np.array([0, 1, -1, 2, 3, -200, 1 << 24, -(1 << 30)], np.int32)
    found = levels_of(codes, table).tolist()
    assert found == [0, 9, -9, 20, 32, -2002, 32767, -32767]


def test_centroids_of_cells_are_found():
    classes = np.arange(20, 60)
    values = np.repeat([0.7, 1.7, 2.7, 3.7, -0.7], len(classes)).reshape(-1, len(classes))
    centroids = Centroids()
    centroids.add(np.tile(values, (500, 1)).astype(np.float32), classes)
    levels = centroids.levels()
    per_step = levels[classes, :1].astype(float)
    expected = per_step * (-0.3 * np.array([1000, 500, 500]) / (np.array([1000, 500, 500]) + 50))
    assert np.abs(levels[classes, 1:] - expected).max() <= 0.5 + 1e-6
    assert not levels[0, 1:].any() and len(levels) == NUM_CLASSES


def test_integers_of_a_unit_without_components():
    integers, _ = one_unit(np.zeros(16), STEP)
    assert isinstance(integers, LoopIntegers) and integers.classes.shape == (1, 0)
