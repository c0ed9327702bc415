"""Restores ``OneStep`` in one pass after the entropy decoder: the rows of its pipeline, faster.

Only where numba is installed, the host multiplies small integers, heads are multiples of 16
channels, and engines hold bf16 or fp32. The pipeline handles all other cases, and always packs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.entropy.class_coder import ClassCoder
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.fused import (
    AddressesOf,
    HeadAddresses,
    RopeTables,
    aligned,
    fits_vector_units,
    if_installed,
    padded,
    proven_or_pipeline,
    rope_tables,
    wave_run,
)
from kvstore.codecs.stacks.int16_products import panels_of
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.integer_rows import StepRows
from kvstore.codecs.stages.uniform import Predictors
from kvstore.shapes import DType, KVRun

CODECS = "one-step codecs"  # in the log


@dataclass(frozen=True, eq=False)
class StepKernels:
    """A compiled function, and the matrix layout that it requires."""

    unpack: Callable[..., None]
    addresses_of: AddressesOf
    group: int  # narrow components in one 32-bit group
    offset: int  # added to the levels of narrow components
    columns: int  # columns of a panel


@dataclass(frozen=True, eq=False)
class StepTables:
    """The integers of all units, in the order in which kernels read them.

    ``coded``: int32 (coded components, 9), see ``kernels.units.one_step_levels``; ``first_rows``:
    int64 (units + 1,), the first of each unit. ``counts``: int32 (units, 3). ``wide``, ``matrix``:
    uint32 (units, panels, groups, columns), where a group holds two wide components, or several
    narrow ones; ``begins``: the initial values of their sums, int32 (units, panels, columns).
    ``rows``: int8 (units, components, width). ``means``: fp32 (units, width). ``parts``: the gain
    group of each head vector, int64. ``factors``: uint32 (units, panels, pairs, columns), where a
    pair is two known components, and ``finer``: int32 (units, components): see ``Predictors``.
    """

    coded: np.ndarray
    first_rows: np.ndarray
    counts: np.ndarray
    wide: np.ndarray
    matrix: np.ndarray
    begins: np.ndarray
    rows: np.ndarray
    means: np.ndarray
    parts: np.ndarray
    factors: np.ndarray
    finer: np.ndarray


@dataclass(frozen=True, eq=False)
class FusedSteps:
    """Restores in one pass, and packs with its pipeline. Implements ``StackPacker``."""

    pipeline: Pipeline
    coder: ClassCoder
    scales: np.ndarray
    tables: StepTables
    turns: RopeTables
    addresses: HeadAddresses
    kernels: StepKernels

    def nbytes(self, num_tokens: int) -> int:
        return self.pipeline.nbytes(num_tokens)

    def least_nbytes(self, num_tokens: int) -> int:
        return self.pipeline.least_nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        return self.pipeline.encode(run, first, first_token, dtype)

    def decode(
        self, reader: Reader, out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        addresses = self.addresses(out, first) if dtype != "float16" else None
        if addresses is None:
            return self.pipeline.decode(reader, out, first, first_token, dtype)
        num_tokens = out[0][0].shape[1] - first
        kept, exact = self.pipeline.read_kept(reader, num_tokens)
        gains = self.pipeline.gain.read(reader, num_tokens) * self.scales[:, None, None]
        read = self.coder.read_coded(reader, num_tokens)
        t, turns = self.tables, self.turns.of(self.pipeline.shape, first_token, num_tokens, dtype)
        coded = (read.symbols, np.ascontiguousarray(read.low), read.rare, t.coded)
        units = (t.counts, t.wide, t.matrix, t.begins, t.rows, t.means, t.parts)
        by_part = np.ascontiguousarray(gains.swapaxes(1, 2), np.float32)
        stored = (t.factors, t.finer)
        self.kernels.unpack(coded, t.first_rows, units, stored, by_part, turns, addresses)
        self.pipeline.put_kept(out, first, kept, exact, dtype)


def fused_steps(
    pipeline: Pipeline,
    coder: ClassCoder,
    profile: Profile,
    known: tuple[StepRows, np.ndarray, Predictors, np.ndarray],
) -> StackPacker:
    """Makes the fused packer of a pipeline; the pipeline itself if it cannot be fused on this host.

    ``known``: rows and levels of ``step_integers.rows_of``, predictors, and all elements' means.
    """
    turns = rope_tables(pipeline.shape, profile.ropes)
    usable = profile.layout.dtype != "float16" and fits_vector_units(pipeline.shape)
    kernels = _kernels() if turns is not None and usable else None
    if turns is None or kernels is None:
        return pipeline
    tables = _tables(pipeline.shape, kernels, coder, *known)
    addresses = HeadAddresses(pipeline.shape, kernels.addresses_of)
    fused = FusedSteps(pipeline, coder, known[0].scales, tables, turns, addresses, kernels)
    return proven_or_pipeline(fused, profile.layout, wave_run(profile.layout), CODECS)


@functools.cache
def _kernels() -> StepKernels | None:
    return if_installed(_load_kernels, CODECS)


def _load_kernels() -> StepKernels:
    from kvstore.codecs.kernels.emit import dots
    from kvstore.codecs.kernels.units import kernel_parts, unpack_one_step

    host = dots.host_vectors()
    known = (host.group, host.offset, host.tile_columns)
    return StepKernels(unpack_one_step.unpack, kernel_parts.addresses_of, *known)


def _tables(
    shape: StackShape,
    kernels: StepKernels,
    coder: ClassCoder,
    rows: StepRows,
    levels: np.ndarray,
    predictors: Predictors,
    means: np.ndarray,
) -> StepTables:
    live, symbols = coder.rows
    units, places = np.divmod(live, levels.shape[1])
    known = [np.stack([units, places], axis=1), symbols, levels[units, places]]
    matrix = _panels(shape, kernels.columns, rows.rows, kernels.group)
    sums = _panels(shape, kernels.columns, rows.rows.sum(axis=1, keepdims=True, dtype=np.int32), 1)
    starts = [part.start for part in shape.gain_groups]
    return StepTables(
        coded=np.concatenate(known, axis=1).astype(np.int32),
        first_rows=np.searchsorted(units, np.arange(shape.num_units + 1)).astype(np.int64),
        counts=rows.counts.astype(np.int32),
        wide=_panels(shape, kernels.columns, rows.wide, 2),
        matrix=matrix,
        begins=aligned(-kernels.offset * sums[:, :, 0].view(np.int32)),
        rows=np.ascontiguousarray(rows.rows),
        means=aligned(means[shape.elements].astype(np.float32)),
        parts=np.searchsorted(starts, shape.starts, side="right").astype(np.int64) - 1,
        factors=_factors(predictors, kernels.columns),
        finer=predictors.finer.astype(np.int32),
    )


def _factors(predictors: Predictors, columns: int) -> np.ndarray:
    if not predictors.components:
        return np.zeros((len(predictors.finer), 0, 0, columns), np.uint32)
    return aligned(np.stack([panels_of(x, columns) for x in predictors.factors]))


def _panels(shape: StackShape, columns: int, rows: np.ndarray, size: int) -> np.ndarray:
    """Joins ``size`` consecutive rows into one, 32 bits a column, with columns padded to panels.

    Returns uint32 (units, panels of all head vectors, groups, columns).
    """
    kind = {1: np.int32, 2: np.int16, 4: np.int8}[size]
    units, segments = shape.num_units, len(shape.starts)
    dim = shape.units[0][0].dim
    groups, panels = -(-rows.shape[1] // size), -(-dim // columns)
    panelled = aligned(np.zeros((units, segments * panels, groups, columns), np.uint32))
    view = panelled.view(kind).reshape(units, segments, panels, groups, columns, size)
    for unit in range(units):
        filled = padded(rows[unit].T.reshape(segments, dim, -1), panels * columns, groups * size)
        parts = filled.reshape(segments, panels, columns, groups, size)
        view[unit] = parts.transpose(0, 1, 3, 2, 4)
    return panelled
