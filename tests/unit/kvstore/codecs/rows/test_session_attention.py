"""Attention to a session's exact and packed rows: numpy, compiled, and restoring first."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.floats import round_to_bf16, widen
from kvstore.codecs.rows.attention import (
    ReferenceSessionAttention,
    RowShapes,
    SessionRows,
    session_attention,
)
from kvstore.codecs.rows.rotated_rows import RotatedRows
from tests.unit.kvstore.codecs.samples import uneven

HEADS = 2
BF16 = RowShapes(RotatedRows(3), 64, 80, "bfloat16", 3)
FP16 = RowShapes(RotatedRows(4), 64, 80, "float16", 6)
COMPILED = pytest.mark.parametrize(
    "shapes", [BF16, pytest.param(FP16, marks=pytest.mark.thorough)], ids=["bf16", "fp16"]
)


def side(shapes, dim, seed, counts):
    """Rows of one side, and the same in float64 with packed rows restored."""
    first, num_packed, newest = counts
    exact = uneven((HEADS, first + newest, dim), seed=seed)
    if shapes.dtype == "float16":
        bits = exact.astype(np.float16).view(np.uint16)
    else:
        bits = round_to_bf16(exact)
    shape, row_nbytes = (HEADS, num_packed), shapes.rows.packed_nbytes(dim)
    if num_packed:
        codes, scales = shapes.rows.pack(uneven((HEADS * num_packed, dim), seed=seed + 1))
        restored = shapes.rows.unpack(codes, scales, dim).reshape(*shape, dim)
    else:
        codes, scales = np.empty(0, np.uint8), np.empty(0, np.uint16)
        restored = np.empty((*shape, dim), np.float32)
    codes = codes.reshape(*shape, row_nbytes)
    sinks, recent = bits[:, :first], bits[:, first:]
    wide = [widen(sinks, shapes.dtype), restored, widen(recent, shapes.dtype)]
    rows = SessionRows(sinks, codes, scales.reshape(shape), recent)
    return rows, np.concatenate(wide, axis=1).astype(np.float64)


def check(attention, shapes, num_queries, counts, size=1.0):
    keys, right_keys = side(shapes, shapes.key_dim, 1, counts)
    values, right_values = side(shapes, shapes.value_dim, 5, counts)
    query = np.float32(size) * uneven((HEADS, num_queries, shapes.key_dim), seed=9)
    out = np.empty((HEADS, num_queries, shapes.value_dim), np.float32)
    attention.attend(query, keys, values, out)
    scores = np.einsum("hqd,htd->hqt", query.astype(np.float64), right_keys)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    right = np.einsum("hqt,htd->hqd", weights, right_values)
    # A score of some hundreds has an error of its last bits, and so has its exponential.
    tolerance = 2e-6 * max(10.0, np.abs(scores).max())
    assert np.allclose(out, right, rtol=0, atol=tolerance * np.abs(right_values).max())


COUNTS = [(1, 0, 0), (4, 0, 65), (4, 1, 64), (4, 6, 100), (4, 61, 127)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("shapes", [BF16, FP16], ids=["bf16", "fp16"])
def test_the_definition_is_restoring_and_attending(shapes, counts):
    for num_queries in (1, 5):
        check(ReferenceSessionAttention(shapes), shapes, num_queries, counts)


@pytest.mark.slow
@COMPILED
def test_compiled_code_agrees(shapes):
    pytest.importorskip("numba")
    attention = session_attention(shapes)
    assert not isinstance(attention, ReferenceSessionAttention)
    for counts in COUNTS:
        check(attention, shapes, shapes.num_queries, counts)
    for size in (0.0, 0.01, 30.0, 1e4):  # from equal weights to that of a single row
        check(attention, shapes, shapes.num_queries, COUNTS[-1], size)


@pytest.mark.slow
@COMPILED
def test_every_finite_bit_pattern_is_widened_as_numpy_does(shapes):
    """A session of one token: its value is the answer."""
    pytest.importorskip("numba")
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = patterns[np.isfinite(widen(patterns, shapes.dtype))]
    query = np.zeros((1, 1, shapes.key_dim), np.float32)
    keys = single_token(shapes, np.zeros(shapes.key_dim, np.uint16))
    out = np.empty((1, 1, shapes.value_dim), np.float32)
    attention = session_attention(shapes)
    for start in range(0, len(finite), shapes.value_dim):
        row = np.resize(finite[start : start + shapes.value_dim], shapes.value_dim)
        attention.attend(query, keys, single_token(shapes, row), out)
        assert (out[0, 0] == widen(row, shapes.dtype)).all()


def single_token(shapes, row):
    codes = np.zeros((1, 0, shapes.rows.packed_nbytes(len(row))), np.uint8)
    exact = row[None, None]
    return SessionRows(exact, codes, np.zeros((1, 0), np.uint16), exact[:, :0])
