"""Restores ``OneStep`` in one pass after the entropy decoder: the rows of its pipeline, faster.

Only where numba is installed, the host multiplies small integers, heads are multiples of 16
channels, and engines hold bf16 or fp32. The pipeline handles all other cases, and always packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np

from kvstore.codecs.entropy.class_coder import ClassCoder
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.fused import (
    FusedPacker,
    aligned,
    kernels_for,
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

CODECS = "one-step codecs"  # in the log
KERNELS: Final = "kvstore.codecs.kernels.units.unpack_one_step"


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
class FusedSteps(FusedPacker):
    """Restores in one pass, and packs with its pipeline. Implements ``StackPacker``."""

    coder: ClassCoder
    scales: np.ndarray
    tables: StepTables

    def unpack(
        self,
        reader: Reader,
        num_tokens: int,
        turns: tuple[object, ...],
        addresses: tuple[np.ndarray, np.ndarray],
    ) -> None:
        gains = self.pipeline.gain.read(reader, num_tokens) * self.scales[:, None, None]
        read, t = self.coder.read_coded(reader, num_tokens), self.tables
        coded = (read.symbols, np.ascontiguousarray(read.low), read.rare, t.coded)
        units = (t.counts, t.wide, t.matrix, t.begins, t.rows, t.means, t.parts)
        by_part = np.ascontiguousarray(gains.swapaxes(1, 2), np.float32)
        stored = (t.factors, t.finer)
        self.kernels.unpack(coded, t.first_rows, units, stored, by_part, turns, addresses)


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
    kernels = kernels_for(pipeline.shape, profile.layout, KERNELS) if turns is not None else None
    if turns is None or kernels is None:
        return pipeline
    tables = _tables(pipeline.shape, kernels, coder, *known)
    fused = FusedSteps(pipeline, turns, kernels, coder, known[0].scales, tables)
    return proven_or_pipeline(fused, profile.layout, wave_run(profile.layout), CODECS)


def _tables(
    shape: StackShape,
    kernels: ModuleType,
    coder: ClassCoder,
    rows: StepRows,
    levels: np.ndarray,
    predictors: Predictors,
    means: np.ndarray,
) -> StepTables:
    live, symbols = coder.rows
    units, places = np.divmod(live, levels.shape[1])
    known = [np.stack([units, places], axis=1), symbols, levels[units, places]]
    columns = kernels.TILE_COLUMNS
    matrix = _panels(shape, columns, rows.rows, kernels.GROUP)
    sums = _panels(shape, columns, rows.rows.sum(axis=1, keepdims=True, dtype=np.int32), 1)
    starts = [part.start for part in shape.gain_groups]
    return StepTables(
        coded=np.concatenate(known, axis=1).astype(np.int32),
        first_rows=np.searchsorted(units, np.arange(shape.num_units + 1)).astype(np.int64),
        counts=rows.counts.astype(np.int32),
        wide=_panels(shape, columns, rows.wide, 2),
        matrix=matrix,
        begins=aligned(-kernels.OFFSET * sums[:, :, 0].view(np.int32)),
        rows=np.ascontiguousarray(rows.rows),
        means=aligned(means[shape.elements].astype(np.float32)),
        parts=np.searchsorted(starts, shape.starts, side="right").astype(np.int64) - 1,
        factors=_factors(predictors, columns),
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
