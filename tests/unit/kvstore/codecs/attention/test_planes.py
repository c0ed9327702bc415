"""Products with columns of bit planes, and weighted sums: compiled, and by numpy's definition."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.attention import planes
from kvstore.codecs.attention.planes import PlaneLevels
from kvstore.codecs.literature.polar_quant import Polar
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.sources import Components
from kvstore.codecs.stages.planes import BitPlanes
from tests.unit.kvstore.codecs.samples import uneven

UNITS = 2


def packed(bits, num_tokens, seed=0):
    """Codes of columns of ``bits``, and their planes."""
    rng, bits = np.random.default_rng(seed), np.array(bits)
    codes = rng.integers(0, 1 << bits, (UNITS, num_tokens, len(bits))).astype(np.uint8)
    coder = BitPlanes(np.tile(bits, (UNITS, 1)))
    return codes, coder.take(Reader(memoryview(coder.write(codes))), num_tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 37])
def test_codes_of_some_columns_are_those_that_were_written(num_tokens):
    codes, found = packed([3, 1, 8, 8, 2], num_tokens)
    np.testing.assert_array_equal(found.codes(slice(1, 4)), codes[:, :, 1:4])
    np.testing.assert_array_equal(found.codes(slice(None)), codes)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_rows_are_numbers_of_the_table(num_tokens):
    codes, found = packed([3] * 5, num_tokens)
    levels = uneven((4,))
    source = PlaneLevels(found, 1, 3, 5, levels)
    np.testing.assert_array_equal(source.rows(), levels[codes >> 1])


@pytest.mark.slow
@pytest.mark.parametrize("num_bits", [1, 2, 3, 4])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_compiled_planes_agree(num_bits, num_queries):
    pytest.importorskip("numba")
    assert planes._kernels(num_bits, 1) is not None
    for num_tokens in (0, 1, 64, 135):
        _, found = packed([num_bits + 2] * 20, num_tokens)
        source = PlaneLevels(found, 1, num_bits + 2, 20, uneven((1 << num_bits,)))
        rows = Components(source.rows())
        query = uneven((UNITS, num_queries, 20), seed=1)
        assert_close(source.products(query), rows.products(query))
        weights = np.abs(uneven((UNITS, num_queries, num_tokens), seed=2))
        assert_close(source.sums(weights), rows.sums(weights))


@pytest.mark.slow
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 135])
def test_compiled_angles_agree(num_tokens, num_queries):
    pytest.importorskip("numba")
    polar, width = Polar(32), 32
    stack = uneven((UNITS, num_tokens, width))
    coder = BitPlanes(np.tile(polar.bits, (UNITS, 1)))
    written = coder.write(polar.quantise(stack))
    source = polar.attended(coder.take(Reader(memoryview(written)), num_tokens))
    assert source.kernels(1) is not None
    rows = Components(source.rows())
    query = uneven((UNITS, num_queries, width), seed=1)
    assert_close(source.products(query), rows.products(query))
    weights = np.abs(uneven((UNITS, num_queries, num_tokens), seed=2))
    assert_close(source.sums(weights), rows.sums(weights))


@pytest.mark.slow
def test_damaged_radii_are_finite_in_compiled_code_too():
    polar = Polar(16)
    codes = np.zeros((1, 3, len(polar.bits)), np.uint8)
    codes[0, :, -2:] = [(0, 0x7C), (1, 0x7C), (0, 0xFC)]  # infinite, no number, minus infinity
    coder = BitPlanes(polar.bits[None])
    source = polar.attended(coder.take(Reader(memoryview(coder.write(codes))), 3))
    query = np.ones((1, 1, 16), np.float32)
    assert_close(source.products(query), Components(source.rows()).products(query))


def assert_close(found, right):
    atol = 2e-5 * np.abs(right).max(initial=0)
    np.testing.assert_allclose(found, right, rtol=0, atol=atol)
