"""The Triton kernels against numpy's definition: in the interpreter, or on a GPU if there is one.

Run with an environment that has triton and torch: ``TRITON_INTERPRET=1 pytest tests/triton``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.triton_rows import TritonRows  # noqa: E402
from kvstore.codecs import floats  # noqa: E402
from kvstore.codecs.rotated_rows import RotatedRows  # noqa: E402

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HEADS, BLOCK, BLOCKS = 2, 8, 9


def paged(dim: int, dtype: torch.dtype, token_major: bool) -> torch.Tensor:
    """(num_blocks, heads, tokens, dim) as half of a fused cache, with channels of unequal size."""
    generator = torch.Generator().manual_seed(dim)
    loud = torch.exp(torch.randn(dim, generator=generator))
    shape = (BLOCKS, BLOCK, HEADS, dim) if token_major else (BLOCKS, HEADS, BLOCK, dim)
    fused = torch.randn(*shape[:3], 2 * dim, generator=generator)
    fused[..., dim:] *= loud
    cache = fused.to(dtype).to(DEVICE)[..., dim:]
    return cache.transpose(1, 2) if token_major else cache


def rows_of(cache: torch.Tensor, blocks: torch.Tensor, first: int, count: int) -> np.ndarray:
    """(heads * count, dim) bit patterns, head by head."""
    run = cache[blocks].transpose(0, 1).reshape(HEADS, -1, cache.shape[3])[:, first : first + count]
    flat = run.reshape(HEADS * count, -1).contiguous()
    return flat.view(torch.int16).cpu().numpy().view(np.uint16)


def packed_by(
    kernels: TritonRows, cache, blocks, first, count
) -> tuple[torch.Tensor, torch.Tensor]:
    nbytes = kernels.rows.packed_nbytes(kernels.dim)
    packed = torch.zeros(HEADS * count, nbytes, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(HEADS * count, dtype=torch.int16, device=DEVICE)
    kernels.pack(cache, blocks, first, count, packed, scales)
    return packed, scales


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("bits", [3, 4])
def test_same_bytes_as_the_definition(bits, dim, dtype, token_major):
    rows = RotatedRows(bits)
    kernels = TritonRows(rows, dim, DEVICE)
    name = "float16" if dtype == torch.float16 else "bfloat16"
    cache = paged(dim, dtype, token_major)
    blocks = torch.tensor([7, 2, 5], device=DEVICE)
    first, count = 4, 17
    packed, scales = packed_by(kernels, cache, blocks, first, count)

    stored = rows_of(cache, blocks, first, count)
    expected, expected_scales = rows.pack(floats.widen(stored, name))
    assert np.array_equal(packed.cpu().numpy(), expected)
    assert np.array_equal(scales.cpu().numpy().view(np.uint16), expected_scales)

    back = torch.zeros_like(cache)
    kernels.unpack(back, blocks, first, count, packed, scales)
    wanted = floats.narrow(rows.unpack(expected, expected_scales, dim), name).view(np.uint16)
    assert np.array_equal(rows_of(back, blocks, first, count), wanted)
    assert int((back != 0).any(3).sum()) == HEADS * count  # no other row was touched


def test_rows_that_cannot_be_packed_say_so():
    rows, dim = RotatedRows(3), 64
    kernels = TritonRows(rows, dim, DEVICE)
    cache = paged(dim, torch.bfloat16, token_major=False)
    blocks = torch.tensor([0, 1], device=DEVICE)
    odd = [0.0, float("inf"), float("nan"), 1e-40, 1e30]
    for token, value in enumerate(odd):
        cache[0, 0, token] = value
    packed, scales = packed_by(kernels, cache, blocks, 0, 16)
    assert scales[: len(odd)].tolist() == [0] * len(odd)
    assert bool((scales[len(odd) :] != 0).all())
    stored = rows_of(cache, blocks, 0, 16)
    _, expected = rows.pack(floats.widen(stored, "bfloat16"))
    assert np.array_equal(scales.cpu().numpy().view(np.uint16), expected)

    back = torch.full_like(cache, 5.0)
    kernels.unpack(back, blocks, 0, 16, packed, scales)
    assert bool((back[0, 0, : len(odd)] == 5.0).all())
