"""Products with packed rows of a stack, and weighted sums, through the stages of its pipeline.

See ``stacks.sources``. Rows that a pipeline stores unquantised have a gain of zero here, so they
count as zero, except for a mean that a stage before the gain adds.

Where bit planes hold the columns, the bits of a column choose one number of a table (a level, a
sign), the same table for all columns. ``rows`` of a source defines them in numpy; ``kernels`` has
products and sums compiled, in fp32, up to the order of addition.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from kvstore.codecs.attention.rotated import TOLERANCE
from kvstore.codecs.loops.compiled import compiled_module
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.sources import (
    AttendedTransform,
    Components,
    Scaled,
    Source,
)
from kvstore.codecs.stacks.stage_protocols import Quantiser
from kvstore.codecs.stages.planes import BitPlanes, PackedPlanes

logger = logging.getLogger(__name__)

KERNELS: Final = "kvstore.codecs.kernels.rows.numba_planes"
MOST_QUERIES: Final = 4  # in one pass over the planes
MOST_BITS: Final = 4  # for which there are kernels


@runtime_checkable
class PlaneQuantiser(Protocol):
    """A quantiser whose codes need not be read from their planes one by one."""

    def attended(self, planes: PackedPlanes) -> Source:
        """Returns the components of all codes as a source."""


class PlaneKernels(NamedTuple):
    """Compiled functions of the planes, (first, step), a table, queries or weights, and results."""

    products: Callable[..., None]
    sums: Callable[..., None]


# Planes; the first plane and the planes from one column to the next; the table.
Known: TypeAlias = tuple[np.ndarray, tuple[int, int], np.ndarray]


class PlaneSource(ABC):
    """Rows whose codes bit planes hold: compiled code reads them, or they are restored."""

    planes: PackedPlanes
    columns: int  # values of a row

    @property
    @abstractmethod
    def known(self) -> Known:
        """The first arguments of the kernels."""

    @abstractmethod
    def rows(self) -> np.ndarray:
        """Returns the rows themselves: the definition of products and sums."""

    @abstractmethod
    def kernels(self, num_queries: int) -> PlaneKernels | None:
        """Returns kernels for so many queries at once."""

    def products(self, query: np.ndarray) -> np.ndarray:
        found = np.empty((*query.shape[:2], self.planes.num_tokens), np.float32)
        for part in _blocks(query.shape[1]):
            kernels = self.kernels(part.stop - part.start)
            if kernels is None:
                found[:, part] = Components(self.rows()).products(query[:, part])
            else:
                kernels.products(*self.known, query[:, part].astype(np.float32), found[:, part])
        return found

    def sums(self, weights: np.ndarray) -> np.ndarray:
        found = np.empty((*weights.shape[:2], self.columns), np.float32)
        for part in _blocks(weights.shape[1]):
            kernels = self.kernels(part.stop - part.start)
            if kernels is None:
                found[:, part] = Components(self.rows()).sums(weights[:, part])
            else:
                kernels.sums(*self.known, weights[:, part].astype(np.float32), found[:, part])
        return found


@dataclass(frozen=True, eq=False)
class PlaneLevels(PlaneSource):
    """Numbers of a table, chosen by the planes of some columns. Implements ``Source``."""

    planes: PackedPlanes
    first: int  # the plane of the first column's lowest bit
    step: int  # planes from one column to the next
    columns: int
    levels: np.ndarray  # fp32 (two to the power of a column's bits,)

    @property
    def known(self) -> Known:
        return self.planes.array, (self.first, self.step), self.levels

    def rows(self) -> np.ndarray:
        array, num_tokens = self.planes.array, self.planes.num_tokens
        codes = np.zeros((len(array), self.columns, num_tokens), np.uint8)
        for bit in range(self._num_bits):
            chosen = array[:, self.first + bit :: self.step][:, : self.columns]
            bits = np.unpackbits(chosen, axis=2, count=num_tokens, bitorder="little")
            codes |= bits << bit
        found: np.ndarray = self.levels[codes].swapaxes(1, 2)
        return found

    def kernels(self, num_queries: int) -> PlaneKernels | None:
        return _kernels(self._num_bits, num_queries)

    @property
    def _num_bits(self) -> int:
        return len(self.levels).bit_length() - 1


def levels_of_planes(planes: PackedPlanes, levels: np.ndarray) -> PlaneLevels:
    """Returns the numbers of columns that have as many bits as ``levels`` need."""
    num_bits = len(levels).bit_length() - 1
    return PlaneLevels(planes, 0, num_bits, len(planes.bits), levels)


def _blocks(num_queries: int) -> list[slice]:
    starts = range(0, num_queries, MOST_QUERIES)
    return [slice(i, min(i + MOST_QUERIES, num_queries)) for i in starts]


@functools.cache
def _kernels(num_bits: int, num_queries: int) -> PlaneKernels | None:
    if num_bits > MOST_BITS:
        return None
    num_tokens, columns, step = 83, 5, num_bits + 1
    array = np.arange(2 * columns * step * 11, dtype=np.uint32).reshape(2, columns * step, 11)
    planes = PackedPlanes((array * array % 251).astype(np.uint8), np.empty(0, np.int64), num_tokens)
    levels = np.sin(np.arange(1 << num_bits, dtype=np.float32) ** 2)
    source = PlaneLevels(planes, 1, step, columns, levels)
    return agreeing_kernels("levels", num_bits, num_queries, source)


def agreeing_kernels(
    codes: str, num_bits: int, num_queries: int, some: PlaneSource
) -> PlaneKernels | None:
    """Returns compiled functions if they agree with numpy on this host for some few rows.

    ``codes``: what planes hold, by the name that the kernels have for it.
    """
    compiled = compiled_module(KERNELS)
    if compiled is None:
        return None
    shape = (codes, num_bits, num_queries)
    kernels = PlaneKernels(compiled.products_kernel(*shape), compiled.sums_kernel(*shape))
    if _agree(kernels, num_queries, some):
        return kernels
    logger.warning("products with planes of %s are wrong here: using numpy", codes)
    return None


def _agree(kernels: PlaneKernels, num_queries: int, some: PlaneSource) -> bool:
    units, num_tokens = len(some.planes.array), some.planes.num_tokens
    wave = np.sin(np.arange(units * num_queries * max(num_tokens, some.columns)) ** 2)
    shape, rows = (units, num_queries, -1), Components(some.rows())
    query = wave[: units * num_queries * some.columns].astype(np.float32).reshape(shape)
    weights = np.abs(wave[: units * num_queries * num_tokens]).astype(np.float32).reshape(shape)
    for kernel, given, right in (
        (kernels.products, query, rows.products(query)),
        (kernels.sums, weights, rows.sums(weights)),
    ):
        found = np.empty_like(right)
        kernel(*some.known, given, found)
        if not np.allclose(found, right, rtol=0, atol=TOLERANCE * np.abs(right).max()):
            return False
    return True


class KeptRow(NamedTuple):
    """A row that is stored unquantised."""

    unit: int
    token: int
    bits: np.ndarray  # uint16 (width,), the bits of the values


class AttendedStack(NamedTuple):
    """The rows of a stack: the packed ones, and those stored unquantised."""

    source: Source
    kept: Sequence[KeptRow]


@runtime_checkable
class AttendedCoder(Protocol):
    """A coder whose codes need not be unpacked."""

    def attended(self, reader: Reader, num_tokens: int, quantiser: Quantiser) -> Source:
        """Returns the components of all codes as a source."""


def can_attend(pipeline: object) -> bool:
    """Returns whether all stages of a stack can work on queries and sums instead of rows."""
    if not isinstance(pipeline, Pipeline) or len(pipeline.shape.gain_groups) != 1:
        return False
    stages = (*pipeline.before, *pipeline.after)
    return all(isinstance(stage, AttendedTransform) for stage in stages)


def attended_stack(pipeline: Pipeline, reader: Reader, num_tokens: int) -> AttendedStack:
    """Reads a stack's part of a payload; ``can_attend`` of the pipeline must be true.

    Raises:
        Corrupt: this pipeline did not write the payload.
    """
    numbers, exact = pipeline.read_kept(reader, num_tokens)
    parts = pipeline.read_parts(reader, num_tokens)
    units, tokens = np.divmod(numbers, max(num_tokens, 1))
    each = zip(units.tolist(), tokens.tolist(), exact, strict=True)
    kept = [KeptRow(*row) for row in each]
    source = _components(pipeline, reader, num_tokens)
    source = _through(source, pipeline.after, parts.after)
    gains = parts.gains[:, :, 0].copy()
    gains[units, tokens] = 0
    return AttendedStack(_through(Scaled(source, gains), pipeline.before, parts.before), kept)


def _components(pipeline: Pipeline, reader: Reader, num_tokens: int) -> Source:
    coder, quantiser = pipeline.coder, pipeline.quantiser
    if isinstance(coder, AttendedCoder):
        return coder.attended(reader, num_tokens, quantiser)
    if not (isinstance(coder, BitPlanes) and coder.are_units_alike):
        return Components(quantiser.restore(coder.read(reader, num_tokens)))
    planes = coder.take(reader, num_tokens)
    if isinstance(quantiser, PlaneQuantiser):
        return quantiser.attended(planes)
    return Components(quantiser.restore(planes.codes(slice(None))))


def _through(source: Source, stages: Sequence[object], notes: Sequence[object]) -> Source:
    for stage, note in zip(stages[::-1], notes[::-1], strict=True):
        assert isinstance(stage, AttendedTransform)
        source = stage.attended(source, note)
    return source
