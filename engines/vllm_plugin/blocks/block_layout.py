"""Finds out where an attention backend puts K and V inside a block.

vLLM shows every layer's cache as one tensor, logically (num_blocks, num_kv_heads, block_tokens,
width), and the strides distinguish head-major from token-major layouts. But the backend decides
the meaning of the last two axes. Most backends put K in the first half of the last axis and V in
the second. The CPU backend does not: a (block, head) is a K half followed by a V half, with K in an
order that depends on the instruction set its kernel was built for. Reading this tensor by its
shape would mix the elements of different tokens.

Latent attention (MLA) has one row per token for all heads: the latent, followed by the rotary
key. This module treats them as K and V of one head.

So known numbers are written once through the backend's own kernel, and their places in the block
reveal the layout. The layout is then checked with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# Small whole numbers are exact in every dtype: bfloat16 has 8 bits of precision.
_BASE = 128
_BITS: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32}  # by bytes per value


class UnknownLayout(ValueError):
    """The cache cannot be read safely; the message describes its layout."""


class KVView(Protocol):
    """K or V of one layer, as blocks (num_blocks, num_kv_heads, block_tokens, head_dim)."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_kv_heads, block_tokens, head_dim)"""

    def read(self, index: Tensor) -> Tensor:
        """Return a copy of the blocks ``index``, (count, num_kv_heads, block_tokens, head_dim)."""

    def write(self, index: Tensor, blocks: Tensor) -> None:
        """Copy ``blocks``, shaped as by ``read``, into the blocks ``index``."""

    @property
    def bits(self) -> np.ndarray | None:
        """The same memory as int16 or int32 blocks for numpy, which has no bfloat16.

        None if it is not in host memory, or strides cannot describe it.
        """


class BlockLayout(Protocol):
    """The places of K and V within a block."""

    def views(self, cache: Tensor) -> tuple[KVView, KVView]:
        """Return views of K and V; reading and writing them reads and writes the cache.

        ``cache``: (num_blocks, num_kv_heads, block_tokens, width of K and V).
        """


class StridedView:
    """K or V that strides can describe: a view of the cache's tensor."""

    def __init__(self, view: Tensor) -> None:
        """``view``: (num_blocks, num_kv_heads, block_tokens, head_dim)."""
        self.view = view
        is_on_host = view.device.type == "cpu"
        self.bits = view.view(_BITS[view.element_size()]).numpy() if is_on_host else None

    @property
    def shape(self) -> tuple[int, int, int]:
        _, heads, tokens, dim = self.view.shape
        return heads, tokens, dim

    def read(self, index: Tensor) -> Tensor:
        return self.view.index_select(0, index)

    def write(self, index: Tensor, blocks: Tensor) -> None:
        self.view.index_copy_(0, index, blocks)


class PermutedView:
    """K or V whose elements have a special order within each (block, head).

    Args:
        flat: (num_blocks, num_kv_heads, block_tokens * head_dim), a view of the cache's tensor.
        order: (block_tokens * head_dim,), int64. The element at position i of a (block, head) has
            the number ``order[i]``, counted token by token.
        dim: head_dim.
    """

    bits = None

    def __init__(self, flat: Tensor, order: Tensor, dim: int) -> None:
        self._flat = flat
        self._order = order
        self._inverse = torch.argsort(order)
        self._dim = dim

    @property
    def shape(self) -> tuple[int, int, int]:
        return self._flat.shape[1], self._flat.shape[2] // self._dim, self._dim

    def read(self, index: Tensor) -> Tensor:
        picked = self._flat.index_select(0, index)[..., self._inverse]
        return picked.view(len(index), *self.shape)

    def write(self, index: Tensor, blocks: Tensor) -> None:
        flat = blocks.reshape(len(index), -1, len(self._order))
        self._flat.index_copy_(0, index, flat[..., self._order])


class SplitContent:
    """The layout with K in the first part of the last axis, and V in the rest.

    Args:
        key_dim: the width of K; None = half of the axis.
    """

    def __init__(self, key_dim: int | None = None) -> None:
        self._key_dim = key_dim

    def views(self, cache: Tensor) -> tuple[KVView, KVView]:
        dim = self._key_dim or cache.shape[3] // 2
        return StridedView(cache[..., :dim]), StridedView(cache[..., dim:])


class SplitBlock:
    """The layout with K in the first half of a (block, head), and V in the second.

    Args:
        order: the order of K's elements, as in ``PermutedView``; None = transposed, head_dim before
            tokens.
        value_order: the order of V's elements; None = token by token.
    """

    def __init__(self, order: Tensor | None = None, value_order: Tensor | None = None) -> None:
        self._order = order
        self._value_order = value_order

    def views(self, cache: Tensor) -> tuple[KVView, KVView]:
        blocks, heads, tokens, width = cache.shape
        dim = width // 2
        halves = cache.view(blocks, heads, 2, tokens * dim)
        keys, values = halves[:, :, 0], halves[:, :, 1]
        key_view: KVView = StridedView(keys.view(blocks, heads, dim, tokens).mT)
        value_view: KVView = StridedView(values.view(blocks, heads, tokens, dim))
        if self._order is not None:
            key_view = PermutedView(keys, self._order, dim)
        if self._value_order is not None:
            value_view = PermutedView(values, self._value_order, dim)
        return key_view, value_view


# Writes one block with the backend's own kernel. Arguments: K and V as the model computes them,
# (block_tokens, num_kv_heads, head_dim), and an empty cache of one block.
WriteBlock = Callable[[Tensor, Tensor, Tensor], None]


def probe_latents(like: Tensor, rank: int, write: WriteBlock) -> BlockLayout:
    """Return the layout in which ``write`` fills blocks of latents of ``rank`` numbers.

    Raises ``UnknownLayout``: a row is not the latent followed by the rotary key.
    """
    layout = SplitContent(rank)
    if not 0 < rank < like.shape[3] or not _reads_back(layout, like, write, rank):
        raise UnknownLayout(
            f"the attention backend does not keep latents of {rank} numbers, and then rotary keys,"
            f" in rows of {like.shape[3]} {like.dtype}; choose another with --attention-backend"
        )
    return layout


def probe(like: Tensor, write: WriteBlock) -> BlockLayout:
    """Return the layout in which ``write`` fills blocks of a cache such as ``like``.

    Raises ``UnknownLayout``: no known layout reads the written rows back.
    """
    _, heads, tokens, width = like.shape
    if width % 2:
        raise UnknownLayout(f"a cache of {tuple(like.shape)} cannot be K and V side by side")
    layouts: list[Callable[[], BlockLayout]] = [
        SplitContent,
        SplitBlock,
        lambda: SplitBlock(_learnt_order(like, write)),
        lambda: SplitBlock(_learnt_order(like, write), _learnt_order(like, write, of_values=True)),
    ]
    for make in layouts:
        layout = make()
        if _reads_back(layout, like, write, width // 2):
            return layout
    raise UnknownLayout(
        f"the attention backend fills blocks of {tokens} tokens, {heads} heads of {width // 2},"
        f" {like.dtype} in an order that cannot be read back; try another block size or dtype"
    )


def _empty_block(like: Tensor) -> Tensor:
    """Make a cache of one block of zeros, with the strides of ``like``."""
    shape, strides = like.shape[1:], like.stride()[1:]
    needed = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = torch.zeros(needed, dtype=like.dtype, device=like.device)
    return memory.as_strided((1, *shape), (needed, *strides))


def _reads_back(layout: BlockLayout, like: Tensor, write: WriteBlock, key_dim: int) -> bool:
    _, heads, tokens, width = like.shape
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(tokens, heads, dim, generator=generator).to(like)
        for dim in (key_dim, width - key_dim)
    ]
    cache = _empty_block(like)
    write(rows[0], rows[1], cache)
    index = torch.zeros(1, dtype=torch.long, device=like.device)
    try:
        found = [view.read(index)[0].transpose(0, 1) for view in layout.views(cache)]
    except RuntimeError:  # these strides do not allow the view
        return False
    return all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))


def _learnt_order(like: Tensor, write: WriteBlock, *, of_values: bool = False) -> Tensor:
    """Find the order of K's elements in the first half of a (block, head), or V's in the second.

    Each element's number is written as three digits, one after the other, so that bfloat16 holds
    them exactly, also those of blocks of thousands of tokens.

    Raises ``UnknownLayout``: the elements are not in that half.
    """
    _, heads, tokens, width = like.shape
    count = tokens * width // 2
    number = torch.arange(count).view(tokens, 1, width // 2).expand(tokens, heads, width // 2)
    order = torch.zeros(count, dtype=torch.long)
    for weight in (1, _BASE, _BASE * _BASE):
        rows = (number // weight % _BASE).to(like).contiguous()
        cache = _empty_block(like)
        others = torch.zeros_like(rows)
        write(*((others, rows) if of_values else (rows, others)), cache)
        half = cache[0, 0].reshape(2, -1)[int(of_values)]
        order += weight * half.float().round().long().cpu()
    if not torch.equal(order.sort().values, torch.arange(count)):
        which = "values" if of_values else "keys"
        raise UnknownLayout(f"{which} do not lie together in a block of the attention backend's")
    return order.to(like.device)
