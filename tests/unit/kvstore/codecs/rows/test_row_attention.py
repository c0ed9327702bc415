"""Products with packed rows, and weighted sums: numpy, compiled, and restoring first."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.attention import ReferenceAttention, row_attention
from kvstore.codecs.rows.rotated_rows import RotatedRows
from tests.unit.kvstore.codecs.samples import uneven


def packed(num_bits, dim, num_tokens, heads=2):
    """Codes, scales, and the restored rows; one row is not packed and counts as zero."""
    rows = RotatedRows(num_bits)
    codes, scales = rows.pack(uneven((heads * num_tokens, dim)))
    scales[1] = 0
    restored = rows.unpack(codes, scales, dim).reshape(heads, num_tokens, dim)
    restored.reshape(-1, dim)[1] = 0
    shape = (heads, num_tokens)
    return codes.reshape(*shape, -1), scales.reshape(shape), restored


def check(attention, num_bits, dim, num_queries, num_tokens=37):
    codes, scales, restored = packed(num_bits, dim, num_tokens)
    query = uneven((2, num_queries, dim), seed=1)
    scores = np.empty((2, num_queries, num_tokens), np.float32)
    attention.scores(query, codes, scales, scores)
    right = np.einsum("hqd,htd->hqt", query, restored)
    assert np.allclose(scores, right, rtol=0, atol=2e-5 * np.abs(right).max())
    weights = np.abs(uneven((2, num_queries, num_tokens), seed=2))
    sums = np.ones((2, num_queries, dim), np.float32)
    attention.add_weighted(weights, codes, scales, sums)
    right = 1 + np.einsum("hqt,htd->hqd", weights, restored)
    assert np.allclose(sums, right, rtol=0, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize("num_bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [16, 64, 80, 112])
def test_the_definition_is_restoring_and_multiplying(num_bits, dim):
    for num_queries in (1, 4):
        check(ReferenceAttention(RotatedRows(num_bits), dim), num_bits, dim, num_queries)


OTHERS = [
    *((bits, 64) for bits in (1, 2, 4, 5, 6, 7)),
    *((3, 16), (5, 80), (7, 112), (8, 128), (4, 256)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_bits", "dim"),
    [(3, 64), (8, 16), *(pytest.param(*x, marks=pytest.mark.thorough) for x in OTHERS)],
)
def test_compiled_code_agrees(num_bits, dim):
    pytest.importorskip("numba")
    attention = row_attention(RotatedRows(num_bits), dim)
    assert not isinstance(attention, ReferenceAttention)
    for num_tokens in (2, 4, 37):
        check(attention, num_bits, dim, 5, num_tokens)


@pytest.mark.slow
def test_no_rows_have_no_scores_and_sums_of_zero():
    pytest.importorskip("numba")
    for attention in (row_attention(RotatedRows(3), 64), ReferenceAttention(RotatedRows(3), 64)):
        codes, scales = np.empty((2, 0, 24), np.uint8), np.empty((2, 0), np.uint16)
        nothing, sums = np.empty((2, 3, 0), np.float32), np.ones((2, 3, 64), np.float32)
        attention.scores(uneven((2, 3, 64)), codes, scales, nothing)
        attention.add_weighted(nothing, codes, scales, sums)
        assert (sums == 1).all()


@pytest.mark.parametrize("dim", [64, 80, 112])
def test_the_compiled_rotation_is_that_of_rows(dim):
    pytest.importorskip("numba")
    from kvstore.codecs.kernels.rows.numba_attention import rotate, rotation_of

    row, turn = uneven((1, dim)), rotation_of(dim)
    right = rotation.rotate(rotation.flip_signs(row, rotation.sign_masks(dim)))
    turned = row.copy()
    rotate(turned, turn, False)
    assert np.allclose(turned, right, rtol=0, atol=1e-5 * np.abs(right).max())
    rotate(turned, turn, True)
    assert np.allclose(turned, dim * row, rtol=0, atol=1e-5 * dim * np.abs(row).max())


@pytest.mark.slow
def test_parts_of_longer_arrays_are_read():
    """Caches have room after their rows, and several sessions' scores share an array."""
    pytest.importorskip("numba")
    codes, scales, restored = packed(3, 64, 40)
    query = uneven((2, 4, 64), seed=1)
    wide = np.full((2, 4, 60), 7, np.float32)
    attention = row_attention(RotatedRows(3), 64)
    attention.scores(query, codes[:, :24], scales[:, :24], wide[:, :, 5:29])
    right = np.einsum("hqd,htd->hqt", query, restored[:, :24])
    assert np.allclose(wide[:, :, 5:29], right, rtol=0, atol=2e-5 * np.abs(right).max())
    assert (wide[:, :, :5] == 7).all() and (wide[:, :, 29:] == 7).all()
