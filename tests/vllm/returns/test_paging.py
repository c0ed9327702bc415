"""Rows into blocks and back, in every arrangement, without an engine."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="comes with vLLM")

from engines.vllm_plugin.blocks.block_layout import SplitBlock, SplitContent  # noqa: E402
from engines.vllm_plugin.blocks.paging import PagedCache, paged_cache  # noqa: E402

BLOCKS, HEADS, TOKENS, DIM = 16, 3, 32, 8
ORDER = torch.randperm(TOKENS * DIM, generator=torch.Generator().manual_seed(1))
ARRANGEMENTS = [SplitContent(), SplitBlock(), SplitBlock(ORDER), SplitBlock(ORDER, ORDER.flip(0))]


def cache_of(arrangement, dtype) -> PagedCache:
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return paged_cache({f"layer{i}": torch.zeros(shape, dtype=dtype) for i in "ab"}, arrangement)


def filled(cache: PagedCache, num_blocks: int):
    run = cache.layout.empty(num_blocks * TOKENS)
    for i, array in enumerate(x for pair in run for x in pair):
        values = torch.arange(array.size).reshape(array.shape).add(i).remainder(251)
        bits = values.to(cache.dtype).view(torch.int16 if array.itemsize == 2 else torch.int32)
        array[...] = bits.numpy().view(array.dtype)
    return run


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=["content", "block", "keys", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read(arrangement, dtype):
    cache = cache_of(arrangement, dtype)
    run = filled(cache, 5)
    cache.write([9, 2, 14], run, 1)  # its second block to its fourth
    back = cache.read([9, 2, 14])
    for wanted, found in zip(run, back, strict=True):
        for a, b in zip(wanted, found, strict=True):
            assert np.array_equal(a[:, TOKENS : 4 * TOKENS], b)
    untouched = cache.read([x for x in range(BLOCKS) if x not in (9, 2, 14)])
    assert not any(array.any() for pair in untouched for array in pair)
