"""Products with packed rows, and weighted sums: mlx operations, and the text of Metal kernels."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest

from engines.mlx_worker.cache.packed import host_rows
from engines.mlx_worker.cache.packed.device_attention import (
    MOST_QUERIES,
    SCORE_TOKENS,
    SUM_TOKENS,
    MetalRowScores,
    MlxRowScores,
    agrees,
    attend,
    row_scores,
    scores_source,
    sums_source,
)
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import RowKind, empty_side
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.attention import TOLERANCE, ReferenceAttention
from tests.unit.engines.mlx_worker.cache.packed.test_metal_packer import name, ran
from tests.unit.kvstore.codecs.samples import uneven

pytestmark = pytest.mark.mlx
KINDS = [
    *(RowKind(bits, 64, "bfloat16") for bits in range(1, 9)),
    *(RowKind(3, 80, "float16"), RowKind(4, 128, "float16")),
    *(RowKind(2, 256, "bfloat16"), RowKind(8, 16, "bfloat16")),
]
HEADS = 2


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_mlx_operations_give_the_definitions_values(kind):
    assert agrees(MlxRowScores(kind), kind)


@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_kernels_give_the_definitions_values_on_metal(kind):
    assert agrees(MetalRowScores(kind), kind)


def test_other_values_than_the_definitions_are_found_out():
    wrong = MlxRowScores(RowKind(4, 64, "bfloat16"))
    wrong._rows._levels = wrong._rows._levels + 1
    assert not agrees(wrong, RowKind(4, 64, "bfloat16"))


def compiled_seldom(kind):
    """A compiler takes seconds for each."""
    usual = (kind.num_bits, kind.dim) in ((3, 80), (8, 16))
    return kind if usual else pytest.param(kind, marks=pytest.mark.thorough)


def packed(kind, num_tokens):
    codes, scales = kind.format.pack(uneven((HEADS * num_tokens, kind.dim)))
    if num_tokens > 1:
        scales[1] = 0  # a row that is not packed
    return codes.reshape(HEADS, num_tokens, -1), scales.reshape(HEADS, num_tokens)


def ran_kernel(source, num_groups, given, codes, scales, size, folder):
    """What the body of a kernel writes, fp32 (size,)."""
    main = f"""
        auto given = read_all<float>({given.size});
        auto codes = read_all<uchar>({codes.size});
        auto scales = read_all<ushort>({scales.size});
        const int scales_shape[] = {{{HEADS}, {scales.shape[1]}}};
        std::vector<float> found({size});
        each_row({num_groups}, [&](Position thread_position_in_grid, uint lane_number) {{
            uint thread_index_in_simdgroup = lane_number;
            {source}
        }});
        write_all(found);
    """
    data = given.tobytes() + codes.tobytes() + scales.tobytes()
    return np.frombuffer(ran(main, data, folder), np.float32)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", [*map(compiled_seldom, KINDS)], ids=name)
def test_the_kernels_text_gives_the_definitions_values(kind, tmp_path):
    num_queries, num_tokens = 1 + kind.num_bits % MOST_QUERIES, SUM_TOKENS + SCORE_TOKENS + 1
    codes, scales = packed(kind, num_tokens)
    query = uneven((HEADS, num_queries, kind.dim), seed=1)
    weights = np.abs(uneven((HEADS, num_queries, num_tokens), seed=2))
    reference = ReferenceAttention(kind.format, kind.dim)
    right, right_sums = np.empty_like(weights), np.zeros_like(query)
    reference.scores(query, codes, scales, right)
    reference.add_weighted(weights, codes, scales, right_sums)

    signs = rotation.sign_masks(kind.dim)
    turned = rotation.rotate(rotation.flip_signs(query.reshape(-1, kind.dim), signs))
    blocks = -(-num_tokens // SCORE_TOKENS)
    source = scores_source(kind, num_queries)
    got = ran_kernel(source, HEADS * blocks, turned, codes, scales, right.size, tmp_path)
    assert_close(got.reshape(right.shape), right)

    blocks = -(-num_tokens // SUM_TOKENS)
    size = (HEADS, blocks, num_queries, kind.dim)
    source = sums_source(kind, num_queries)
    parts = ran_kernel(source, HEADS * blocks, weights, codes, scales, int(np.prod(size)), tmp_path)
    sums = parts.reshape(size).sum(axis=1).reshape(-1, kind.dim)
    turned = rotation.flip_signs(rotation.rotate_back(sums), signs)
    assert_close(turned.reshape(right_sums.shape), right_sums)


def assert_close(one, other):
    np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 5, 70, 133])
def test_attention_on_the_device_is_that_on_the_host(num_tokens):
    kinds = (RowKind(3, 64, "bfloat16"), RowKind(3, 80, "bfloat16"))
    sides = []
    for seed, kind in enumerate(kinds):
        rows = mx.array(uneven((1, HEADS, num_tokens, kind.dim), seed))
        side = empty_side(kind, HEADS).appended(rows)
        count = max(num_tokens - 68, 0)
        sides.append(side.packed(MlxRowPacker(kind), count)[0] if count else side)
    queries = mx.array(uneven((3, 3 * HEADS, 1, 64), seed=5))
    sessions = [tuple(sides), None, tuple(sides)]
    found, right = (x(sessions, kinds, queries, 0.1) for x in (attend, host_rows.attend))
    assert found.shape == (3, 3 * HEADS, 1, 80)
    assert_close(np.array(found), np.array(right))


def test_no_rows_have_no_scores_and_sums_of_zero():
    kind = RowKind(3, 64, "bfloat16")
    codes, scales = mx.zeros((HEADS, 0, 24), mx.uint8), mx.zeros((HEADS, 0), mx.uint16)
    rows = row_scores(kind)
    assert rows.scores(mx.ones((HEADS, 2, 64)), codes, scales).shape == (HEADS, 2, 0)
    sums = rows.weighted_sums(mx.ones((HEADS, 2, 0)), codes, scales)
    assert sums.shape == (HEADS, 2, 64) and not mx.any(sums).item()
