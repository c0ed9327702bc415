"""Copies between vLLM's paged KV blocks and runs of tokens, which codecs pack and restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.blocks.block_copies import BlockCopies
from engines.vllm_plugin.blocks.block_layout import BlockLayout, KVView, UnknownLayout
from kvstore.shapes import DType, KVLayer, KVLayout, KVPair

DTYPES: Mapping[torch.dtype, DType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


@dataclass(frozen=True)
class PagedCache:
    """The KV caches of one rank's layers that keep all tokens, in vLLM's own memory.

    Attributes:
        views: K and V of each layer.
        copies: fast copies for caches in host memory that strides can describe; else None.
        has_latents: K and V are the latents and rotary keys of latent attention.
    """

    views: Sequence[tuple[KVView, KVView]]
    layout: KVLayout
    block_tokens: int
    device: torch.device
    dtype: torch.dtype
    copies: BlockCopies | None = None
    has_latents: bool = False

    def read(self, block_ids: Sequence[int]) -> list[KVPair]:
        """Copy these blocks to host memory, and return them as one run of tokens.

        K and V of each layer: (num_kv_heads, num_tokens, head_dim), C-contiguous, in the layout's
        dtype (bfloat16 as uint16).
        """
        if self.copies is not None:
            run = self.layout.empty(len(block_ids) * self.block_tokens)
            self.copies.read(block_ids, [x for pair in run for x in pair])
            return run
        index = self._index(block_ids)
        return [(_rows(k.read(index)), _rows(v.read(index))) for k, v in self.views]

    def write(self, block_ids: Sequence[int], run: Sequence[KVPair], first_block: int) -> None:
        """Copy ``run``, shaped as in ``read``, from block ``first_block`` on into these blocks."""
        if self.copies is not None:
            self.copies.write(block_ids, [x for pair in run for x in pair], first_block)
            return
        index = self._index(block_ids)
        for views, rows in zip(self.views, run, strict=True):
            for view, array in zip(views, rows, strict=True):
                heads, tokens, dim = view.shape
                blocks = _as_torch(array, self.dtype).view(heads, -1, tokens, dim)
                wanted = blocks[:, first_block : first_block + len(block_ids)]
                view.write(index, wanted.transpose(0, 1).to(self.device))

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.long, device=self.device)


def paged_cache(
    caches: Mapping[str, Tensor], block_layout: BlockLayout, has_latents: bool = False
) -> PagedCache:
    """Make a ``PagedCache`` of vLLM's caches; ``block_layout`` locates K and V in a block.

    ``caches``: by layer name, (num_blocks, num_kv_heads, block_tokens, width), all of one dtype.
    Raises ``UnknownLayout``: a dtype or shape cannot be read.
    """
    first = next(iter(caches.values()))
    if first.dtype not in DTYPES:
        raise UnknownLayout(
            f"the KV cache is {first.dtype}; cold sessions need bfloat16, float16 or float32"
            " (leave --kv-cache-dtype at auto)"
        )
    for name, cache in caches.items():
        if cache.ndim != 4 or cache.dtype != first.dtype or cache.shape[2] != first.shape[2]:
            raise UnknownLayout(f"layer {name} has a cache of {tuple(cache.shape)}, {cache.dtype}")
    views = [block_layout.views(x) for x in caches.values()]
    layers = tuple(KVLayer(k.shape[0], k.shape[2], v.shape[2]) for k, v in views)
    layout = KVLayout(DTYPES[first.dtype], layers)
    found = [view.bits for pair in views for view in pair]
    bits = [x for x in found if x is not None]
    copies = BlockCopies(bits) if bits and len(bits) == len(found) else None
    block_tokens = int(first.shape[2])
    return PagedCache(views, layout, block_tokens, first.device, first.dtype, copies, has_latents)


def _rows(blocks: Tensor) -> np.ndarray:
    """Copy blocks to host memory as (num_kv_heads, num_tokens, head_dim); bfloat16 as uint16.

    ``blocks``: (count, num_kv_heads, block_tokens, head_dim).
    """
    count, heads, tokens, dim = blocks.shape
    rows = blocks.transpose(0, 1).reshape(heads, count * tokens, dim).contiguous().cpu()
    array: np.ndarray = (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array.view(np.uint16) if rows.dtype == torch.bfloat16 else array


def _as_torch(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)
