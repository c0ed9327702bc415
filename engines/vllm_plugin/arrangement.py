"""Where an attention backend puts K and V inside a block: learnt, never assumed.

vLLM shows every layer's cache as one tensor, logically (num_blocks, num_kv_heads, block_tokens,
2 * head_dim), and the strides tell head-major from token-major layouts. But what the last two axes
mean is the backend's business. Most put K in the first half of the last axis and V in the second.
The CPU backend does not: a (block, head) is a K half followed by a V half, with K in an order that
depends on the instruction set its kernel was built for. Reading the view as what it claims to be
would mix the elements of different tokens.

So known numbers are written once through the backend's own kernel, and where they arrive *is* the
arrangement. It is then checked with numbers that it was not learnt from.
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
    """The cache does not look like anything that can be read safely; says what was found."""


class Side(Protocol):
    """K or V of one layer, as blocks (num_blocks, num_kv_heads, block_tokens, head_dim)."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_kv_heads, block_tokens, head_dim)"""

    def read(self, index: Tensor) -> Tensor:
        """These blocks, copied."""

    def write(self, index: Tensor, blocks: Tensor) -> None: ...

    @property
    def bits(self) -> np.ndarray | None:
        """The same memory as blocks for numpy, which has no bfloat16; None if it cannot be."""


class Arrangement(Protocol):
    def sides(self, cache: Tensor) -> tuple[Side, Side]:
        """K and V of this cache. Reading and writing them reads and writes the cache."""


class StridedSide:
    """A side that is a view of the cache."""

    def __init__(self, view: Tensor) -> None:
        self._view = view
        self._bits = _host_bits(view)

    @property
    def view(self) -> Tensor:
        """(num_blocks, num_kv_heads, block_tokens, head_dim)"""
        return self._view

    @property
    def shape(self) -> tuple[int, int, int]:
        _, heads, tokens, dim = self._view.shape
        return heads, tokens, dim

    def read(self, index: Tensor) -> Tensor:
        return self._view.index_select(0, index)

    def write(self, index: Tensor, blocks: Tensor) -> None:
        self._view.index_copy_(0, index, blocks)

    @property
    def bits(self) -> np.ndarray | None:
        return self._bits


def _host_bits(view: Tensor) -> np.ndarray | None:
    if view.device.type != "cpu":
        return None
    bits: np.ndarray = view.view(_BITS[view.element_size()]).numpy()
    return bits


class PermutedSide:
    """A side whose elements lie in an order of their own within each (block, head).

    Args:
        flat: (num_blocks, num_kv_heads, block_tokens * head_dim) view.
        order: which element, counted token by token, lies at each place.
    """

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

    @property
    def bits(self) -> np.ndarray | None:
        return None


class SplitContent:
    """K in the first half of the last axis, V in the second."""

    def sides(self, cache: Tensor) -> tuple[Side, Side]:
        dim = cache.shape[3] // 2
        return StridedSide(cache[..., :dim]), StridedSide(cache[..., dim:])


class SplitBlock:
    """K in the first half of a (block, head), V token by token behind it.

    Args:
        order: of K, as in ``PermutedSide``; None = transposed, head_dim before tokens.
    """

    def __init__(self, order: Tensor | None = None) -> None:
        self._order = order

    def sides(self, cache: Tensor) -> tuple[Side, Side]:
        blocks, heads, tokens, width = cache.shape
        dim = width // 2
        halves = cache.view(blocks, heads, 2, tokens * dim)
        keys, values = halves[:, :, 0], halves[:, :, 1].view(blocks, heads, tokens, dim)
        if self._order is not None:
            return PermutedSide(keys, self._order, dim), StridedSide(values)
        return StridedSide(keys.view(blocks, heads, dim, tokens).mT), StridedSide(values)


# Writes one block the backend's own way. Arguments: K and V as the model has them,
# (block_tokens, num_kv_heads, head_dim), and an empty cache of one block.
WriteBlock = Callable[[Tensor, Tensor, Tensor], None]


def probe(like: Tensor, write: WriteBlock) -> Arrangement:
    """How blocks of a cache such as ``like`` are filled.

    Raises:
        UnknownLayout: in no way that can be read back.
    """
    _, heads, tokens, width = like.shape
    if width % 2:
        raise UnknownLayout(f"a cache of {tuple(like.shape)} cannot be K and V side by side")
    arrangements: list[Callable[[], Arrangement]] = [
        SplitContent,
        SplitBlock,
        lambda: SplitBlock(_learnt_order(like, write)),
    ]
    for make in arrangements:
        arrangement = make()
        if _reads_back(arrangement, like, write):
            return arrangement
    raise UnknownLayout(
        f"the attention backend fills blocks of {tokens} tokens, {heads} heads of {width // 2},"
        f" {like.dtype} in an order that cannot be read back; try another block size or dtype"
    )


def _empty_block(like: Tensor) -> Tensor:
    """One block with the strides of a real one."""
    shape, strides = like.shape[1:], like.stride()[1:]
    needed = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    room = torch.zeros(needed, dtype=like.dtype, device=like.device)
    return room.as_strided((1, *shape), (needed, *strides))


def _reads_back(arrangement: Arrangement, like: Tensor, write: WriteBlock) -> bool:
    _, heads, tokens, width = like.shape
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, tokens, heads, width // 2, generator=generator).to(like)
    cache = _empty_block(like)
    write(rows[0], rows[1], cache)
    index = torch.zeros(1, dtype=torch.long, device=like.device)
    try:
        found = [side.read(index)[0].transpose(0, 1) for side in arrangement.sides(cache)]
    except RuntimeError:  # a view that these strides do not allow
        return False
    return all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))


def _learnt_order(like: Tensor, write: WriteBlock) -> Tensor:
    """Of K in the first half of a (block, head), from two digits of each element's number."""
    _, heads, tokens, width = like.shape
    count = tokens * width // 2
    number = torch.arange(count).view(tokens, 1, width // 2).expand(tokens, heads, width // 2)
    order = torch.zeros(count, dtype=torch.long)
    for digit, weight in ((number % _BASE, 1), (number // _BASE, _BASE)):
        rows = digit.to(like).contiguous()
        cache = _empty_block(like)
        write(rows, torch.zeros_like(rows), cache)
        order += weight * cache[0, 0].reshape(-1)[:count].float().round().long().cpu()
    if not torch.equal(order.sort().values, torch.arange(count)):
        raise UnknownLayout("keys do not lie together in a block of the attention backend's")
    return order.to(like.device)
