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

from engines.vllm_plugin.device.kernels.triton_rows import TritonRows  # noqa: E402
from engines.vllm_plugin.device.kv_views import KVViewGroup  # noqa: E402
from kvstore.codecs import floats  # noqa: E402
from kvstore.codecs.rows.rotated_rows import RotatedRows  # noqa: E402

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HEADS, BLOCK, BLOCKS, COUNT = 2, 8, 9, 17


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


def group_of(cache: torch.Tensor) -> KVViewGroup:
    """The cache as the only side there is."""
    starts = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return KVViewGroup((0,), (cache.view(torch.int16),), starts)


class Packed:
    """A payload of nothing but the packed rows and their scales."""

    def __init__(self, rows: RotatedRows, dim: int, count: int) -> None:
        self._nbytes = HEADS * count * rows.packed_nbytes(dim)
        size = self._nbytes + 2 * HEADS * count
        self.payload = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        self.offsets = torch.tensor([[0, self._nbytes // 2]], device=DEVICE)

    def rows(self) -> np.ndarray:
        return self.payload[: self._nbytes].cpu().numpy().reshape(HEADS * COUNT, -1)

    def scales(self) -> np.ndarray:
        return self.payload[self._nbytes :].cpu().numpy().view(np.uint16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize(("bits", "token_major"), [(3, True), (4, False)])
def test_same_bytes_as_the_definition(bits, token_major, dim, dtype):
    rows = RotatedRows(bits)
    kernels = TritonRows(rows, dim, dtype, DEVICE)
    name = "float16" if dtype == torch.float16 else "bfloat16"
    cache = paged(dim, dtype, token_major)
    blocks = torch.tensor([7, 2, 5], device=DEVICE)
    packed = Packed(rows, dim, COUNT)
    kernels.pack(group_of(cache), blocks, 4, COUNT, packed.payload[None], packed.offsets)

    stored = rows_of(cache, blocks, 4, COUNT)
    expected, expected_scales = rows.pack(floats.widen(stored, name))
    assert np.array_equal(packed.rows(), expected)
    assert np.array_equal(packed.scales(), expected_scales)

    back = torch.zeros_like(cache)
    kernels.unpack(group_of(back), blocks, 4, COUNT, packed.payload[None], packed.offsets)
    wanted = floats.narrow(rows.unpack(expected, expected_scales, dim), name).view(np.uint16)
    assert np.array_equal(rows_of(back, blocks, 4, COUNT), wanted)
    assert int((back != 0).any(3).sum()) == HEADS * COUNT  # no other row was touched
