"""The Triton kernels of the calibrated fixed rate: byte for byte what the host's codec makes.

In Triton's interpreter on the host's memory, or on a GPU where there is one. Through the whole
path, from blocks to blobs and back, against the host's pipeline and its golden digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.device.device_blocks import DeviceBlocks  # noqa: E402
from engines.vllm_plugin.device.kv_views import view_groups  # noqa: E402
from engines.vllm_plugin.device.layouts.layout_choice import StagingLayouts  # noqa: E402
from engines.vllm_plugin.device.layouts.rate_layout import RateStagingLayout  # noqa: E402
from engines.vllm_plugin.device.side_stream import SideStream  # noqa: E402
from engines.vllm_plugin.worker.block_layout import SplitContent  # noqa: E402
from engines.vllm_plugin.worker.host_blocks import HostBlocks  # noqa: E402
from engines.vllm_plugin.worker.paging import PagedCache, paged_cache  # noqa: E402
from engines.vllm_plugin.worker.transfer import Filling, Packing  # noqa: E402
from kvstore.blobs.packer import Packer  # noqa: E402
from kvstore.by_blocks.names import BlobSpan, BlockKeys  # noqa: E402
from kvstore.by_blocks.store import BlockStore  # noqa: E402
from kvstore.codecs.rope import Rope  # noqa: E402
from kvstore.config import StoreConfig  # noqa: E402
from kvstore.tiers.ram_tier import RamTier  # noqa: E402
from tests.block_sessions import FINGERPRINT, hashes  # noqa: E402
from tests.unit.kvstore.codecs.fixed_rate.integer_models import codec_of, rope_of  # noqa: E402

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, EMPTY = 12, 7.0


@dataclass(frozen=True)
class Shape:
    layout: str = "NHD"
    block: int = 8
    per_chunk: int = 2
    heads: int = 1
    dim: int = 64
    layers: int = 1
    dtype: torch.dtype = torch.bfloat16
    rope: Rope | None = rope_of(64)


class Rig:
    """A cache, a store with a calibrated codec, and both ways to it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.caches = {f"layer{i}": cache_of(shape, i) for i in range(shape.layers)}
        self.cache: PagedCache = paged_cache(self.caches, SplitContent())
        self.codec = codec_of(self.cache.layout, shape.rope)
        packer = Packer(self.codec, self.cache.layout, FINGERPRINT)
        keys = BlockKeys(FINGERPRINT, shape.block, shape.per_chunk)
        config = StoreConfig(chunk_tokens=shape.block * shape.per_chunk, num_threads=1)
        self.store = BlockStore(config, packer, keys, FINGERPRINT, [RamTier(1 << 26)])
        groups = view_groups(self.cache)
        assert groups is not None
        self.layouts = StagingLayouts(groups, packer, shape.block, self.cache.dtype)
        self.device = DeviceBlocks(self.cache, self.layouts.of, self.store, staging_bytes=1)
        self.host = HostBlocks(self.cache, self.store, SideStream(DEVICE))

    def spans(self, num_blocks: int) -> list[BlobSpan]:
        return self.store.keys.whole(hashes(list(range(4 * num_blocks))))

    def blobs(self, blocks: DeviceBlocks | HostBlocks, ids: Sequence[int]) -> list[bytes]:
        wanted = [Packing(x, [*ids[x.first_block : x.end_block]]) for x in self.spans(len(ids))]
        return [x.result() for x in blocks.pack(wanted, blocks.mark())]

    def filled(
        self, blocks: DeviceBlocks | HostBlocks, blobs: Sequence[bytes], target: Sequence[int]
    ) -> list[torch.Tensor]:
        """Fill blocks; return the whole cache afterwards, bit for bit."""
        for cache in self.caches.values():
            cache.fill_(EMPTY)
        wanted = [
            Filling(x, blob, 0, [*target[x.first_block : x.end_block]])
            for x, blob in zip(self.spans(len(target)), blobs, strict=True)
        ]
        assert blocks.fill(wanted, blocks.mark()) == set(target)
        return [bits(x) for x in self.caches.values()]


def cache_of(shape: Shape, layer: int) -> torch.Tensor:
    """One layer as vLLM shows it, (blocks, heads, tokens, K | V), with channels of unequal size."""
    inner = (shape.block, shape.heads) if shape.layout == "NHD" else (shape.heads, shape.block)
    generator = torch.Generator().manual_seed(layer)
    loud = torch.exp(torch.randn(2 * shape.dim, generator=generator))
    values = torch.randn(NUM_BLOCKS, *inner, 2 * shape.dim, generator=generator) * loud
    cache = values.to(shape.dtype).to(DEVICE)
    return cache.transpose(1, 2) if shape.layout == "NHD" else cache


def bits(cache: torch.Tensor) -> torch.Tensor:
    kinds = {2: torch.int16, 4: torch.int32}
    return cache.contiguous().view(kinds[cache.element_size()]).cpu().clone()


SHAPES = {
    "NHD, two layers, two heads": Shape(heads=2, layers=2),
    "HND": Shape(layout="HND", heads=2),
    "head_dim 128": Shape(dim=128, rope=rope_of(128)),
    "head_dim 128, half of it turned, fp16": Shape(dim=128, dtype=torch.float16),
    "head_dim 256": Shape(dim=256, rope=rope_of(256)),
    "head_dim 256, fp32": Shape(dim=256, rope=rope_of(256), dtype=torch.float32),
    "head_dim 32, not turned": Shape(dim=32, rope=None),
    "neighbours are turned": Shape(rope=Rope(tuple(2.0**-k for k in range(32)), True)),
    "fp16": Shape(dtype=torch.float16),
    "fp32": Shape(dtype=torch.float32, heads=2),
    "several programs for a chunk": Shape(block=24, per_chunk=2),
    "an odd number of tokens": Shape(block=17, per_chunk=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_host_and_the_device_make_and_read_the_same_blobs(shape):
    rig = Rig(shape)
    ids, target = [7, 2, 10, 4, 5], [3, 9, 0, 6, 8]
    assert isinstance(rig.layouts.of(rig.spans(5)[0]), RateStagingLayout)
    expected = rig.blobs(rig.host, ids)
    assert rig.blobs(rig.device, ids) == expected
    found = rig.filled(rig.device, expected, target)
    right = rig.filled(rig.host, expected, target)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
