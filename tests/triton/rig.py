"""A paged cache on a device, its store, and both ways from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engines.vllm_plugin.blocks.block_layout import SplitContent
from engines.vllm_plugin.blocks.blocks import Blocks, Filling, Packing
from engines.vllm_plugin.blocks.host_blocks import HostBlocks
from engines.vllm_plugin.blocks.paging import PagedCache, paged_cache
from engines.vllm_plugin.device.device_blocks import DeviceBlocks
from engines.vllm_plugin.device.kv_views import view_groups
from engines.vllm_plugin.device.packed_layout import StagingLayouts
from engines.vllm_plugin.device.staging_layout import StagingLayout
from kvstore.blobs.chain import NAME_BYTES, Piece
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.base import Codec
from kvstore.shapes import KVLayout
from tests.block_sessions import open_store
from tests.lazy_device import device_here

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 12
EMPTY = 7.0  # of a block that was never written


@dataclass(frozen=True)
class Shape:
    layout: str = "NHD"
    block: int = 8
    per_chunk: int = 2
    heads: int = 1
    dim: int = 64
    layers: int = 1
    dtype: torch.dtype = torch.bfloat16


class Rig:
    is_broken = False  # after two chunks

    def __init__(self, shape: Shape, codec_for: Callable[[KVLayout], Codec]) -> None:
        self.shape = shape
        layers = [fused(shape, i) for i in range(shape.layers)]
        if shape.layout == "BLHNC":  # a block has all layers
            layers = list(torch.stack(layers, 1).unbind(1))
        self.caches = {f"layer{i}": x for i, x in enumerate(layers)}
        self.cache: PagedCache = paged_cache(self.caches, SplitContent())
        self.codec = codec_for(self.cache.layout)
        self.chunk_tokens = shape.block * shape.per_chunk
        self.store = open_store(
            codecs=StoreCodecs(self.codec),
            layout=self.cache.layout,
            chunk_tokens=self.chunk_tokens,
        )
        groups = view_groups(self.cache)
        self.layouts = StagingLayouts(groups, self.store.packer, self.cache.dtype)
        self.accelerator = device_here()
        self.device = DeviceBlocks(self.cache, self.layout_of, self.store, self.accelerator, 1)
        self.host = HostBlocks(self.cache, self.store, self.accelerator.stream())

    def layout_of(self, piece: Piece) -> StagingLayout:
        if self.is_broken and piece.first_token >= 2 * self.chunk_tokens:
            raise RuntimeError("the device is gone")
        return self.layouts.of(piece)

    def pieces(self, num_blocks: int) -> list[Piece]:
        """Chunks, the first with the sinks."""
        count = num_blocks // self.shape.per_chunk
        return self.store.keys.chunks([bytes([i]) * NAME_BYTES for i in range(count)])

    def _placed(self, ids: Sequence[int]) -> list[tuple[Piece, list[int]]]:
        size = self.shape.per_chunk
        return [(x, [*ids[i * size :][:size]]) for i, x in enumerate(self.pieces(len(ids)))]

    def packing(self, ids: Sequence[int]) -> list[Packing]:
        return [Packing(x, own) for x, own in self._placed(ids)]

    def fillings(self, blobs: Sequence[bytes], target: Sequence[int]) -> list[Filling]:
        placed = zip(self._placed(target), blobs, strict=True)
        return [Filling(x, blob, 0, own) for (x, own), blob in placed]

    def blobs(self, blocks: Blocks, ids: Sequence[int]) -> list[bytes]:
        return [x.result() for x in blocks.pack(self.packing(ids), blocks.mark())]

    def filled(self, blocks: Blocks, wanted: list[Filling]) -> tuple[set[int], list[torch.Tensor]]:
        """Fill blocks; return which were filled, and the whole cache afterwards, bit for bit."""
        for cache in self.caches.values():
            cache.fill_(EMPTY)
        done = blocks.fill(wanted, blocks.mark())
        return done, [bits(x) for x in self.caches.values()]

    def restored(
        self, blocks: Blocks, blobs: Sequence[bytes], target: Sequence[int]
    ) -> list[torch.Tensor]:
        """Fill all these blocks; return the whole cache afterwards, bit for bit."""
        done, found = self.filled(blocks, self.fillings(blobs, target))
        assert done == set(target)
        return found

    def close(self) -> None:
        self.device.close()
        self.store.close()


def fused(shape: Shape, layer: int) -> torch.Tensor:
    """One layer as vLLM shows it, (blocks, heads, tokens, K | V), with channels of unequal size."""
    token_major = shape.layout == "NHD"
    inner = (shape.block, shape.heads) if token_major else (shape.heads, shape.block)
    generator = torch.Generator().manual_seed(layer)
    loud = torch.exp(torch.randn(2 * shape.dim, generator=generator))
    values = torch.randn(NUM_BLOCKS, *inner, 2 * shape.dim, generator=generator) * loud
    cache = values.to(shape.dtype).to(DEVICE)
    return cache.transpose(1, 2) if token_major else cache


def bits(cache: torch.Tensor) -> torch.Tensor:
    kinds = {2: torch.int16, 4: torch.int32}
    return cache.contiguous().view(kinds[cache.element_size()]).cpu().clone()


def are_equal(found: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
