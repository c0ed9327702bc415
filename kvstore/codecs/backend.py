"""Which implementation packs an array: kernels where numba has them, else numpy.

Both give the same bytes. numba is an optional install; without it everything works, slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from kvstore.codecs.payload import ArraySlot
from kvstore.codecs.reference import ReferenceKernel
from kvstore.codecs.rows import RowFormat
from kvstore.shapes import DType


class ArrayKernel(Protocol):
    """Packs all rows of one layer's K or V; one per row format, dimension and dtype."""

    def pack(self, source: np.ndarray, payload: np.ndarray, slot: ArraySlot) -> None:
        """Write packed rows and scales of ``source`` (num_heads, num_tokens, dim) into ``payload``.

        ``source`` may have any strides between heads and tokens; its rows are contiguous.
        """

    def unpack(self, payload: np.ndarray, slot: ArraySlot, out: np.ndarray) -> None:
        """The inverse. Rows whose scale is zero come out as something finite of no meaning."""


Backend: TypeAlias = Callable[[RowFormat, int, DType], ArrayKernel]


@functools.cache
def reference_kernel(rows: RowFormat, dim: int, dtype: DType) -> ArrayKernel:
    return ReferenceKernel(rows, dtype)


@functools.cache
def best_kernel(rows: RowFormat, dim: int, dtype: DType) -> ArrayKernel:
    return ReferenceKernel(rows, dtype)
