"""A small cache with the engine's own shapes and strides, full of numbers, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.vllm_plugin.blocks.block_layout import KVView, StridedView
from engines.vllm_plugin.blocks.paging import PagedCache
from kvstore.blobs.segments import squeezes
from kvstore.codecs.base import Codec
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayer, KVLayout


def scratch_for(codec: Codec, cache: PagedCache, num_blocks: int) -> PagedCache:
    """Make a cache of few blocks that ``codec`` can pack.

    It has one layer of each kind, and more if first tokens would have no segment of their own, as
    they have in the real cache; or all layers for a codec that was calibrated for this model.
    """
    numbers = {(_kind(k), _kind(v)): i for i, (k, v) in enumerate(cache.views)}
    chosen = set(numbers.values())
    for number in range(len(cache.views)):
        scratch = _scratch(cache, [cache.views[i] for i in sorted(chosen)], num_blocks)
        if squeezes(scratch.layout, 0) or not squeezes(cache.layout, 0):
            break
        chosen.add(number)
    try:
        codec.check(scratch.layout)
    except UnknownCodec:
        return _scratch(cache, cache.views, num_blocks)
    return scratch


def _scratch(
    cache: PagedCache, pairs: Sequence[tuple[KVView, KVView]], num_blocks: int
) -> PagedCache:
    views = _views_like([_view(side) for pair in pairs for side in pair], num_blocks)
    for number, view in enumerate(views):
        _fill(view, number)
    sides = [StridedView(x) for x in views]
    found = list(zip(sides[::2], sides[1::2], strict=True))
    layers = tuple(KVLayer(k.shape[0], k.shape[2], v.shape[2]) for k, v in found)
    layout = KVLayout(cache.layout.dtype, layers)
    return PagedCache(found, layout, cache.block_tokens, cache.device, cache.dtype)


def _kind(side: KVView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    view = _view(side)
    return tuple(view.shape[1:]), view.stride()


def _view(side: KVView) -> Tensor:
    assert isinstance(side, StridedView), "``view_groups`` takes no other"
    return side.view


@dataclass
class _Room:
    """Sides that share blocks, such as K and V, or all layers if one block contains them all.

    Their copies share memory, too: with the cache's strides, each side alone would take as much
    memory as all of them together.
    """

    origin: int  # the address of the first side
    members: list[tuple[int, Tensor]] = field(default_factory=list)

    def has_place_for(self, view: Tensor) -> bool:
        """Say whether a side ends within the first side's block."""
        _, first = self.members[0]
        alike = view.stride(0) == first.stride(0) and view.dtype == first.dtype
        return bool(alike and self.offset_of(view) + _extent(view) <= view.stride(0))

    def offset_of(self, view: Tensor) -> int:
        return int(view.data_ptr() - self.origin) // int(view.element_size())

    def copies(self, num_blocks: int) -> dict[int, Tensor]:
        """Return a copy of each side, with ``num_blocks`` blocks of zeros, by its number."""
        _, first = self.members[0]
        ends = [self.offset_of(x) + _extent(x) for _, x in self.members]
        size = (num_blocks - 1) * first.stride(0) + max(ends)
        memory = torch.zeros(size, dtype=first.dtype, device=first.device)
        return {
            number: memory.as_strided(
                (num_blocks, *x.shape[1:]), x.stride(), storage_offset=self.offset_of(x)
            )
            for number, x in self.members
        }


def _views_like(views: Sequence[Tensor], num_blocks: int) -> list[Tensor]:
    rooms: list[_Room] = []
    for number, view in sorted(enumerate(views), key=lambda x: x[1].data_ptr()):
        if not rooms or not rooms[-1].has_place_for(view):
            rooms.append(_Room(view.data_ptr()))
        rooms[-1].members.append((number, view))
    copies = {n: x for room in rooms for n, x in room.copies(num_blocks).items()}
    return [copies[number] for number in range(len(views))]


def _extent(view: Tensor) -> int:
    """Return the number of elements that one block spans."""
    outer = zip(view.shape[1:], view.stride()[1:], strict=True)
    return 1 + sum((int(n) - 1) * int(s) for n, s in outer)


def _fill(view: Tensor, number: int) -> None:
    """Fill a side with rows of many sizes, and two rows that kernels must treat specially."""
    ramp = torch.arange(view.numel(), dtype=torch.float64).add(number).remainder(10007)
    sizes = torch.exp2(torch.arange(view.shape[2], dtype=torch.float64) % 8 - 3)
    view.copy_((ramp * ramp).sin().reshape(view.shape) * sizes[:, None])
    # After the session's first tokens, and not in the tail.
    view[-2, 0, 0] = 0
    view[-2, -1, -1] = torch.inf
