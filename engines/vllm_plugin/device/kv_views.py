"""Views of the K and V of a paged cache for kernels: one table of addresses for all layers.

A *side* is the K or the V of one layer. A kernel for single sides would be launched a hundred times
for a chunk, although the work of a chunk takes a millisecond. So one launch handles all sides of
one shape and one set of strides; a table holds the distance of each side from the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engines.vllm_plugin.blocks.block_layout import StridedView
from engines.vllm_plugin.blocks.paging import PagedCache

BITS: Final = {2: torch.int16, 4: torch.int32}  # element size -> the dtype that kernels see
ALIGNED: Final = 8  # elements, as in ``kernels.row_kernels``


@dataclass(frozen=True, eq=False)
class KVViewGroup:
    """The sides of one shape and one set of strides.

    Attributes:
        side_numbers: their numbers among all sides: K of the first layer, its V, K of the second
            layer, ...
        views: int16 or int32 (num_blocks, num_kv_heads, block_tokens, dim), one for each side; the
            memory of the cache itself.
        starts: int64 (num_sides,) on the device, distances in elements from ``views[0]`` to each
            side.
    """

    side_numbers: tuple[int, ...]
    views: tuple[Tensor, ...]
    starts: Tensor

    @property
    def dim(self) -> int:
        """The elements of a row: the head dimension of K or V."""
        return int(self.views[0].shape[3])

    def launch_arguments(self, first: int, count: int) -> tuple[int, ...]:
        """Return the common arguments of kernels for tokens ``first .. first + count`` of a run.

        They are: number of rows, first token, number of tokens, tokens of a block, and the strides
        of block, head and token in elements.
        """
        _, heads, block_tokens, _ = self.views[0].shape
        s_block, s_head, s_token, _ = self.views[0].stride()
        return heads * count, first, count, block_tokens, s_block, s_head, s_token

    def num_elements(self, count: int) -> int:
        """Return the number of elements of ``count`` tokens of one side."""
        return int(self.views[0].shape[1]) * count * self.dim


def view_groups(cache: PagedCache) -> list[KVViewGroup] | None:
    """Group the sides of a cache; None if kernels cannot address a side: permuted or unaligned."""
    sides = [side for pair in cache.views for side in pair]
    views: list[Tensor] = []
    for side in sides:
        if not isinstance(side, StridedView) or not _is_plain(side.view):
            return None
        views.append(side.view.view(BITS[side.view.element_size()]))
    kinds = [(x.shape[1:], x.stride()) for x in views]
    numbers = [[i for i, x in enumerate(kinds) if x == kind] for kind in dict.fromkeys(kinds)]
    groups = [_group(views, x) for x in numbers]
    return groups if all(_is_aligned(x) for x in groups) else None


def _group(views: Sequence[Tensor], numbers: list[int]) -> KVViewGroup:
    members = tuple(views[i] for i in numbers)
    origin, size = members[0].data_ptr(), members[0].element_size()
    starts = [(x.data_ptr() - origin) // size for x in members]
    table = torch.tensor(starts, dtype=torch.int64).to(members[0].device)
    return KVViewGroup(tuple(numbers), members, table)


def _is_plain(view: Tensor) -> bool:
    """Return whether rows are contiguous and all strides keep them aligned for 16-byte loads."""
    *outer, inner = view.stride()
    return inner == 1 and not view.shape[3] % ALIGNED and not any(x % ALIGNED for x in outer)


def _is_aligned(group: KVViewGroup) -> bool:
    step = ALIGNED * group.views[0].element_size()
    return not any(x.data_ptr() % step for x in group.views)
