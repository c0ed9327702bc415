"""Products with columns that bit planes hold, and weighted sums of them.

The bits of a column choose one number of a table (a level, a sign), the same table for all columns.
``PlaneLevels.rows`` defines them in numpy; ``kernels`` has products and sums compiled, in fp32, up
to the order of addition.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvstore.codecs.attention.rotated import TOLERANCE
from kvstore.codecs.loops.compiled import compiled_module
from kvstore.codecs.stacks.sources import Components, Source
from kvstore.codecs.stages.planes import PackedPlanes

logger = logging.getLogger(__name__)

KERNELS: Final = "kvstore.codecs.kernels.rows.numba_planes"
MOST_QUERIES: Final = 4  # in one pass over the planes
MOST_BITS: Final = 4  # for which there are kernels


@runtime_checkable
class PlaneQuantiser(Protocol):
    """A quantiser whose codes need not be read from their planes one by one."""

    def attended(self, planes: PackedPlanes) -> Source:
        """Returns the components of all codes as a source."""


class _Kernels(NamedTuple):
    # (planes, (first, step), levels, queries or weights, out)
    products: Callable[..., None]
    sums: Callable[..., None]


@dataclass(frozen=True, eq=False)
class PlaneLevels:
    """Numbers of a table, chosen by the planes of some columns. Implements ``Source``."""

    planes: PackedPlanes
    first: int  # the plane of the first column's lowest bit
    step: int  # planes from one column to the next
    columns: int
    levels: np.ndarray  # fp32 (two to the power of a column's bits,)

    def products(self, query: np.ndarray) -> np.ndarray:
        found = np.empty((*query.shape[:2], self.planes.num_tokens), np.float32)
        for part in _blocks(query.shape[1]):
            kernels = self._kernels(part)
            if kernels is None:
                found[:, part] = Components(self.rows()).products(query[:, part])
            else:
                kernels.products(*self._given(query[:, part]), found[:, part])
        return found

    def sums(self, weights: np.ndarray) -> np.ndarray:
        found = np.empty((*weights.shape[:2], self.columns), np.float32)
        for part in _blocks(weights.shape[1]):
            kernels = self._kernels(part)
            if kernels is None:
                found[:, part] = Components(self.rows()).sums(weights[:, part])
            else:
                kernels.sums(*self._given(weights[:, part]), found[:, part])
        return found

    def rows(self) -> np.ndarray:
        array, num_tokens = self.planes.array, self.planes.num_tokens
        codes = np.zeros((len(array), self.columns, num_tokens), np.uint8)
        for bit in range(self._num_bits):
            chosen = array[:, self.first + bit :: self.step][:, : self.columns]
            bits = np.unpackbits(chosen, axis=2, count=num_tokens, bitorder="little")
            codes |= bits << bit
        found: np.ndarray = self.levels[codes].swapaxes(1, 2)
        return found

    @property
    def _num_bits(self) -> int:
        return len(self.levels).bit_length() - 1

    def _kernels(self, part: slice) -> _Kernels | None:
        return _kernels(self._num_bits, part.stop - part.start)

    def _given(self, given: np.ndarray) -> tuple[object, ...]:
        return self.planes.array, (self.first, self.step), self.levels, given.astype(np.float32)


def levels_of_planes(planes: PackedPlanes, levels: np.ndarray) -> PlaneLevels:
    """Returns the numbers of columns that have as many bits as ``levels`` need."""
    num_bits = len(levels).bit_length() - 1
    return PlaneLevels(planes, 0, num_bits, len(planes.bits), levels)


def _blocks(num_queries: int) -> list[slice]:
    starts = range(0, num_queries, MOST_QUERIES)
    return [slice(i, min(i + MOST_QUERIES, num_queries)) for i in starts]


@functools.cache
def _kernels(num_bits: int, num_queries: int) -> _Kernels | None:
    """Returns compiled functions if they agree with numpy on this host."""
    compiled = compiled_module(KERNELS)
    if compiled is None or num_bits > MOST_BITS:
        return None
    shape = (num_bits, num_queries)
    kernels = _Kernels(compiled.products_kernel(*shape), compiled.sums_kernel(*shape))
    if _agree(kernels, num_bits, num_queries):
        return kernels
    logger.warning("products with planes of %d bits are wrong here: using numpy", num_bits)
    return None


def _agree(kernels: _Kernels, num_bits: int, num_queries: int) -> bool:
    """Returns whether kernels and numpy give the same for the middle columns of a few tokens."""
    num_tokens, columns, step = 83, 5, num_bits + 1
    array = np.arange(2 * columns * step * 11, dtype=np.uint32).reshape(2, columns * step, 11)
    planes = PackedPlanes((array * array % 251).astype(np.uint8), np.empty(0, np.int64), num_tokens)
    wave = np.sin(np.arange(2 * num_queries * num_tokens, dtype=np.float32) ** 2)
    levels = PlaneLevels(planes, 1, step, columns, wave[: 1 << num_bits].copy())
    query = wave[: 2 * num_queries * columns].reshape(2, num_queries, columns)
    weights = np.abs(wave).reshape(2, num_queries, num_tokens)
    known, rows = (planes.array, (1, step), levels.levels), Components(levels.rows())
    for kernel, given, right in (
        (kernels.products, query, rows.products(query)),
        (kernels.sums, weights, rows.sums(weights)),
    ):
        found = np.empty_like(right)
        kernel(*known, given, found)
        if not np.allclose(found, right, rtol=0, atol=TOLERANCE * np.abs(right).max()):
            return False
    return True
