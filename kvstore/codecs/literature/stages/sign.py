"""One bit: the side of zero on which a value lies. It stands for the mean size of a component."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.attention.planes import levels_of_planes
from kvstore.codecs.rows.lloyd_max import gauss_table
from kvstore.codecs.stacks.sources import Source
from kvstore.codecs.stages.planes import PackedPlanes


class Sign:
    """Keeps the sign; code 1 is positive. Implements ``Quantiser``."""

    def __init__(self, size: float | None = None) -> None:
        """``size``: the value of a bit; by default the mean size of a standard normal variable."""
        self._size = np.float32(gauss_table(2).levels[0] if size is None else size)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        return (components > 0).astype(np.uint8)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return np.where(codes > 0, self._size, -self._size)

    def attended(self, planes: PackedPlanes) -> Source:
        return levels_of_planes(planes, np.array([-self._size, self._size], np.float32))
