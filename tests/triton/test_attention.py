"""Scores and weighted sums by Triton against numpy's: in the interpreter, or on a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.device.kernels.triton_attention import TILE, TritonAttention  # noqa: E402
from kvstore.codecs.attention.rotated import TOLERANCE, ReferenceAttention  # noqa: E402
from kvstore.codecs.rows.rotated_rows import RotatedRows  # noqa: E402

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HEADS = 2
KINDS = [*((bits, 64) for bits in range(1, 9)), (3, 16), (4, 80), (2, 112), (3, 128), (8, 256)]


def on_device(array):
    return torch.from_numpy(array).to(DEVICE)


def assert_close(found, right):
    atol = TOLERANCE * np.abs(right).max(initial=0)
    np.testing.assert_allclose(found.cpu().numpy(), right, rtol=0, atol=atol)


@pytest.mark.parametrize(("bits", "dim"), KINDS)
def test_scores_and_sums_are_the_definitions(bits, dim):
    rng, rows = np.random.default_rng(dim), RotatedRows(bits)
    loud = rng.lognormal(0, 1, dim).astype(np.float32)
    attention, reference = TritonAttention(rows, dim, DEVICE), ReferenceAttention(rows, dim)
    most = TILE // 64 + 5
    packed = rows.pack(rng.standard_normal((HEADS * most, dim), np.float32) * loud)
    packed[1][1] = 0  # a row that is not packed
    for num_tokens, num_queries in ((0, 1), (1, 2), (most, 3)):
        codes, scales = (
            np.ascontiguousarray(x.reshape(HEADS, most, *x.shape[1:])[:, :num_tokens])
            for x in packed
        )
        query = rng.standard_normal((HEADS, num_queries, dim), np.float32)
        weights = rng.random((HEADS, num_queries, num_tokens), np.float32)
        right, right_sums = np.empty_like(weights), np.zeros_like(query)
        reference.scores(query, codes, scales, right)
        reference.add_weighted(weights, codes, scales, right_sums)
        given = on_device(codes), on_device(scales.view(np.int16))
        assert_close(attention.scores(on_device(query), *given), right)
        assert_close(attention.weighted_sums(on_device(weights), *given), right_sums)
