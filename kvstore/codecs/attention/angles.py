"""Products with rows of polar coordinates, and weighted sums of them.

A block of 16 neighbours is a radius and fifteen angles: one of each two neighbours, one of each two
of the radii that those leave, and so on. A column of codes holds an angle, or a byte of a radius in
fp16. The finest angles of all blocks come first, the radii last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.codecs.attention.planes import Known, PlaneKernels, PlaneSource, agreeing_kernels
from kvstore.codecs.stages.planes import PackedPlanes

BLOCK: Final = 16
LEVEL_BITS: Final = (4, 2, 2, 2)  # of an angle, from the finest
RADIUS_BITS: Final = 16
BLOCK_BITS: Final = sum((BLOCK >> k + 1) * n for k, n in enumerate(LEVEL_BITS)) + RADIUS_BITS


@dataclass(frozen=True, eq=False)
class AnglePlanes(PlaneSource):
    """Blocks of polar coordinates in bit planes. Implements ``Source``."""

    planes: PackedPlanes
    columns: int
    # The cosines of each level's angles, then their sines, level by level, fp32 (numbers,).
    table: Callable[[], np.ndarray]
    # Maps codes, uint8 (units, tokens, columns), to rows: the definition.
    restore: Callable[[np.ndarray], np.ndarray]

    @property
    def known(self) -> Known:
        return self.planes.array, (0, 1), self.table()

    def rows(self) -> np.ndarray:
        return self.restore(self.planes.codes(slice(None)))

    def kernels(self, num_queries: int) -> PlaneKernels | None:
        return _kernels(self.table, self.restore, num_queries)


@functools.cache
def _kernels(
    table: Callable[[], np.ndarray], restore: Callable[[np.ndarray], np.ndarray], num_queries: int
) -> PlaneKernels | None:
    num_tokens, blocks = 83, 2
    array = np.arange(2 * blocks * BLOCK_BITS * 11, dtype=np.uint32).reshape(2, -1, 11)
    array = (array * array % 251).astype(np.uint8)
    array[:, -2:] = 0  # the sign of the last radius, and the highest bit of its exponent
    array[:, -2 - RADIUS_BITS : -RADIUS_BITS] = 0
    sizes = [blocks * (BLOCK >> k + 1) for k in range(len(LEVEL_BITS))]
    bits = np.repeat((*LEVEL_BITS, 8), (*sizes, 2 * blocks))
    planes = PackedPlanes(array, bits, num_tokens)
    source = AnglePlanes(planes, blocks * BLOCK, table, restore)
    return agreeing_kernels("angles", 1, num_queries, source)
