"""Between vLLM's paged KV blocks and runs of tokens, as codecs want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.arrangement import Arrangement, Side, UnknownLayout
from engines.vllm_plugin.block_copies import BlockCopies
from kvstore.shapes import DType, KVLayer, KVLayout, KVPair

DTYPES: Mapping[torch.dtype, DType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


@dataclass(frozen=True)
class PagedCache:
    """The growing layers of one rank: vLLM's own memory, in the order of the layers.

    ``copies``: the quick way for memory of the host, in orders that a few strides describe.
    """

    sides: Sequence[tuple[Side, Side]]
    layout: KVLayout
    block_tokens: int
    device: torch.device
    dtype: torch.dtype
    copies: BlockCopies | None = None

    def read(self, block_ids: Sequence[int]) -> list[KVPair]:
        """These blocks as one run of tokens, copied to host memory.

        Per layer K and V, (num_kv_heads, num_tokens, head_dim), C-contiguous.
        """
        if self.copies is not None:
            run = self.layout.empty(len(block_ids) * self.block_tokens)
            self.copies.read(block_ids, _arrays(run))
            return run
        index = self._index(block_ids)
        return [(_rows(k.read(index)), _rows(v.read(index))) for k, v in self.sides]

    def write(self, block_ids: Sequence[int], run: Sequence[KVPair], first_block: int) -> None:
        """The other way: blocks ``first_block ..`` of ``run`` into these blocks."""
        if self.copies is not None:
            self.copies.write(block_ids, _arrays(run), first_block)
            return
        index = self._index(block_ids)
        for sides, rows in zip(self.sides, run, strict=True):
            for side, array in zip(sides, rows, strict=True):
                side.write(index, self._blocks(array, side, first_block, len(block_ids)))

    def write_part(self, block_id: int, run: Sequence[KVPair]) -> None:
        """``run``, of fewer tokens than a block has, into the first rows of this one."""
        index = self._index([block_id])
        for sides, rows in zip(self.sides, run, strict=True):
            for side, array in zip(sides, rows, strict=True):
                if (bits := side.bits) is not None:
                    bits[block_id, :, : array.shape[1]] = array.view(bits.dtype)
                else:
                    block = side.read(index)
                    part = _as_torch(array, self.dtype).to(self.device)
                    block[0, :, : array.shape[1]] = part
                    side.write(index, block)

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.long, device=self.device)

    def _blocks(self, array: np.ndarray, side: Side, first_block: int, count: int) -> Tensor:
        heads, tokens, dim = side.shape
        blocks = _as_torch(array, self.dtype).view(heads, -1, tokens, dim)
        return blocks[:, first_block : first_block + count].transpose(0, 1).to(self.device)


def paged_cache(caches: Mapping[str, Tensor], arrangement: Arrangement) -> PagedCache:
    """From what vLLM registers: layer name -> cache.

    Raises:
        UnknownLayout: a dtype or shape that cannot be read.
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
    sides = [arrangement.sides(x) for x in caches.values()]
    layers = tuple(KVLayer(k.shape[0], k.shape[2], v.shape[2]) for k, v in sides)
    layout = KVLayout(DTYPES[first.dtype], layers)
    found = [side.bits for pair in sides for side in pair]
    bits = [x for x in found if x is not None]
    copies = BlockCopies(bits) if bits and len(bits) == len(found) else None
    return PagedCache(sides, layout, int(first.shape[2]), first.device, first.dtype, copies)


def _arrays(run: Sequence[KVPair]) -> list[np.ndarray]:
    return [array for pair in run for array in pair]


def _rows(blocks: Tensor) -> np.ndarray:
    """(num_kv_heads, num_tokens, head_dim) on the host; numpy has no bfloat16, so uint16 bits."""
    count, heads, tokens, dim = blocks.shape
    rows = blocks.transpose(0, 1).reshape(heads, count * tokens, dim).contiguous().cpu()
    array: np.ndarray = (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array.view(np.uint16) if rows.dtype == torch.bfloat16 else array


def _as_torch(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)
