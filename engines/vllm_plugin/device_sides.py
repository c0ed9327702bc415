"""The sides of a paged cache as kernels address them: one table for all layers.

A kernel that handled one side of one layer would be launched a hundred times for a chunk of a
millisecond. Sides of one shape and one set of strides, wherever they were allocated, are handled in
one launch: each begins so many elements away from the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engines.vllm_plugin.arrangement import StridedSide
from engines.vllm_plugin.paging import PagedCache

BITS: Final = {2: torch.int16, 4: torch.int32}  # element size -> what kernels take it for
ALIGNED: Final = 8  # elements, as in ``triton_kernels``


@dataclass(frozen=True, eq=False)
class SideGroup:
    """Attributes:
    numbers: of its sides among all: K of the first layer, V, K of the second layer, ...
    views: integer (num_blocks, num_kv_heads, block_tokens, dim), one for each side; the memory of
        the cache itself.
    starts: int64 on the device, elements from the beginning of ``views[0]`` to each side.
    """

    numbers: tuple[int, ...]
    views: tuple[Tensor, ...]
    starts: Tensor

    @property
    def dim(self) -> int:
        return int(self.views[0].shape[3])

    def sizes(self, first: int, count: int) -> tuple[int, ...]:
        """What all kernels want to know of tokens ``first .. first + count`` of a run."""
        _, heads, block_tokens, _ = self.views[0].shape
        s_block, s_head, s_token, _ = self.views[0].stride()
        return heads * count, first, count, block_tokens, s_block, s_head, s_token

    def num_elements(self, count: int) -> int:
        """Of one side, ``count`` tokens."""
        return int(self.views[0].shape[1]) * count * self.dim


def side_groups(cache: PagedCache) -> list[SideGroup] | None:
    """None if there is a side that kernels cannot address: permuted, or not aligned."""
    sides = [side for pair in cache.sides for side in pair]
    views: list[Tensor] = []
    for side in sides:
        if not isinstance(side, StridedSide) or not _is_plain(side.view):
            return None
        views.append(side.view.view(BITS[side.view.element_size()]))
    kinds = [(x.shape[1:], x.stride()) for x in views]
    numbers = [[i for i, x in enumerate(kinds) if x == kind] for kind in dict.fromkeys(kinds)]
    groups = [_group(views, x) for x in numbers]
    return groups if all(_is_aligned(x) for x in groups) else None


def _group(views: Sequence[Tensor], numbers: list[int]) -> SideGroup:
    members = tuple(views[i] for i in numbers)
    origin, size = members[0].data_ptr(), members[0].element_size()
    starts = [(x.data_ptr() - origin) // size for x in members]
    table = torch.tensor(starts, dtype=torch.int64).to(members[0].device)
    return SideGroup(tuple(numbers), members, table)


def _is_plain(view: Tensor) -> bool:
    """Rows lie together, and every stride keeps them where 16-byte loads can reach them."""
    *outer, inner = view.stride()
    return inner == 1 and not view.shape[3] % ALIGNED and not any(x % ALIGNED for x in outer)


def _is_aligned(group: SideGroup) -> bool:
    step = ALIGNED * group.views[0].element_size()
    return not any(x.data_ptr() % step for x in group.views)
