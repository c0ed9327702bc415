"""Integers cost little against floats, and sums of them are exact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvstore.codecs.one_step.step_integers import rows_of
from kvstore.codecs.stacks.int16_products import Int16Products
from kvstore.codecs.stages.integer_rows import IntegerRows, StepRows
from kvstore.codecs.stages.uniform import UniformStep

SHIFTS = (0.0, -0.08, 0.03, 0.09)


def orthonormal(width, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))[0]


def design(ratios, step=0.5, seed=0):
    basis, shifts = orthonormal(len(ratios), seed), np.tile(SHIFTS, (1, len(ratios), 1))
    rows, levels = rows_of(basis[None], basis[None] * step, ratios[None], shifts)
    return basis, rows, levels


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 384, 768])
@pytest.mark.parametrize("largest", [2.0, 30.0, 200.0])
def test_integers_add_a_few_per_cent_to_the_cost_of_quantising(width, largest):
    step, ratios = 0.5, largest * np.exp2(-9 * np.arange(width) / width)
    ratios[ratios < 0.3] = 0
    basis, rows, levels = design(ratios, step)
    components = np.random.default_rng(1).laplace(size=(1, 3000, width)) * ratios / np.sqrt(2)
    quantiser = UniformStep(step, levels, 0.4)
    codes = quantiser.quantise((components * step).astype(np.float32))
    codes[:, :, ratios == 0] = 0
    added = np.array(SHIFTS)[np.minimum(np.abs(codes.astype(int)), 3)]
    exact = codes + np.sign(codes) * added
    by_integers = IntegerRows(rows).backward(quantiser.restore(codes), 0, None)
    missed = np.mean((exact - components) ** 2) * step**2
    more = np.mean((by_integers - (exact * step) @ basis) ** 2)
    assert more < 0.04 * missed


def test_sums_are_those_of_whole_numbers():
    ratios = np.array([900.0, 40.0, 5.0, 2.0, 1.0, 0.5, 0.4, 0.0])
    _, rows, levels = design(ratios)
    wide, others, finer = rows.counts[0].tolist()
    assert wide >= 2 and wide + others == 7 and finer > 0
    codes = np.array([[[9000, -70, 3, 500, -2, 1, 0, 77], [-1, 0, 0, 0, 0, 0, 0, 0]]], np.int32)
    stack = UniformStep(0.5, levels).restore(codes)
    restored = IntegerRows(rows).backward(stack, 0, None)
    for token in (0, 1):
        for column in range(8):
            known = stack[0, token].tolist()
            fine = sum(known[k] * int(rows.wide[0, k, column]) for k in range(wide))
            total = (fine + (1 << finer >> 1)) >> finer
            total += sum(known[wide + k] * int(rows.rows[0, k, column]) for k in range(others))
            assert restored[0, token, column] == np.float32(total) * rows.scales[0]


def test_sums_wrap_around_for_levels_that_no_packer_writes():
    wide = np.full((1, 3, 1), 32767, np.int16)
    narrow = np.zeros((1, 1, 1), np.int8)
    rows = StepRows(wide, np.ones((1, 3)), wide, narrow, np.array([[3, 0, 2]]), np.ones(1))
    stack = np.full((1, 1, 3), 32767, np.int32)
    total = (3 * 32767**2 + 2 + 2**31) % 2**32 - 2**31
    assert IntegerRows(rows).backward(stack, 0, None)[0, 0, 0] == np.float32(total >> 2)


def test_rows_fit_their_integers_and_sums_their_room():
    for largest in (0.5, 3.5, 80.0, 2000.0):
        ratios = largest * np.exp2(-10 * np.arange(256) / 256)
        _, rows, levels = design(ratios, step=2.0**-6)
        wide = int(rows.counts[0, 0])
        reach = 16 * ratios * levels[0, :, 0]
        assert np.all(reach[:wide] <= 32767)
        assert np.all((4.5 * ratios * levels[0, :, 0])[wide:] <= 127 + 2 * ratios[wide:])
        most = 4 * np.sqrt(256) / rows.scales[0] * 2.0 ** rows.counts[0, 2]
        assert most <= 2**30


def test_a_profile_of_other_shapes_is_refused():
    _, rows, _ = design(np.array([8.0, 2.0, 1.0, 0.0]))
    others = (
        ("counts", rows.counts + 5),
        ("counts", -rows.counts),
        ("wide", rows.wide[:, :, 1:]),
        ("rates", rows.rates[:, 1:]),
        ("encode", rows.encode[:, :1]),
    )
    for name, array in others:
        with pytest.raises(ValueError, match="integers"):
            dataclasses.replace(rows, **{name: array})


@pytest.mark.parametrize("width", [1, 2, 63, 64, 385])
@pytest.mark.parametrize("components", [1, 5, 64, 129])
def test_compiled_products_are_those_of_numpy(components, width):
    rng = np.random.default_rng(width)
    matrix = rng.integers(-32767, 32768, (2, components, width)).astype(np.int16)
    live = np.array([components, components // 2])
    products = Int16Products(matrix, live)
    for num_tokens in (1, 3, 4, 70):
        rows = rng.integers(-32767, 32768, (num_tokens, width)).astype(np.int16)
        for unit in (0, 1):
            sums = products.sums(unit, rows)
            assert sums.shape == (live[unit], num_tokens) and sums.dtype == np.int32
            expected = matrix[unit, : live[unit]].astype(np.int64) @ rows.T.astype(np.int64)
            assert np.array_equal(sums, expected.astype(np.int32))
            assert np.array_equal(sums, products.reference(unit, rows))


@pytest.mark.parametrize("width", [64, 384, 3840])
def test_the_products_of_a_packer_fit_into_32_bits(width):
    basis = np.eye(width)[:4].astype(np.float32)
    basis[0] = 1 / np.sqrt(width)
    rows, _ = rows_of(basis[None], basis[None], np.full((1, 4), 2.0), np.zeros((1, 4, 4)))
    stack = np.zeros((1, 2, width), np.float32)
    stack[0, 0] = 1.09  # gains are steps of 1.5 dB
    stack[0, 1, 2] = 1.09 * np.sqrt(width)
    components, _ = IntegerRows(rows).forward(stack, 0)
    assert np.allclose(components[0, 0], stack[0, 0] @ basis.T, atol=0.01 * np.sqrt(width))
    assert components[0, 1, 2] == pytest.approx(1.09 * np.sqrt(width), rel=0.001)
