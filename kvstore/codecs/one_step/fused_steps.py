"""Packs and restores ``OneStep`` in one pass each: the bytes and rows of its pipeline, faster.

From rows of unit size to symbols, and from symbols to rows. Only where numba is installed, the host
multiplies small integers, heads are multiples of 16 channels, and engines hold bf16 or fp32. The
pipeline handles all other cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Final, TypeAlias

import numpy as np

from kvstore.codecs.entropy.class_coder import ClassCoder, Coded
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
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.integer_rows import IntegerRows, StepRows
from kvstore.codecs.stages.uniform import PredictedStep, Predictors, UniformStep
from kvstore.shapes import DType, KVRun

CODECS = "one-step codecs"  # in the log
Steps: TypeAlias = UniformStep | PredictedStep
KERNELS: Final = "kvstore.codecs.kernels.units.unpack_one_step"
PACKING: Final = "kvstore.codecs.kernels.units.pack_one_step"


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
    """Packs and restores in one pass each. Implements ``StackPacker``.

    ``rows``, ``steps``: the stages of the pipeline that the kernels run.
    """

    packing: ModuleType
    coder: ClassCoder
    rows: IntegerRows
    steps: Steps
    scales: np.ndarray
    tables: StepTables

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        pipeline, t = self.pipeline, self.tables
        stack = pipeline.shape.gather(run, first, dtype)
        stack, notes, gains, kept = pipeline.scaled(stack, first_token)
        symbols, low = np.empty((2, len(t.coded), stack.shape[1]), np.uint8)
        rare = np.empty(symbols.size, np.int32)  # pages that are never written take no memory
        num_rare = self.packing.pack(
            np.ascontiguousarray(stack, np.float32),
            self.rows.forward_tables,
            (t.coded, t.first_rows),
            (t.factors, t.finer),
            (self.rows.input_scale, *self.steps.sizes),
            (symbols, low, rare),
        )
        coded = self.coder.write_coded(Coded(symbols, low, rare[:num_rare]))
        kept_bytes = pipeline.kept_bytes(run, first, kept, dtype)
        return b"".join([kept_bytes, *notes, pipeline.gain.write(gains), coded])

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
    steps: Steps,
    profile: Profile,
    known: tuple[StepRows, np.ndarray, Predictors, np.ndarray],
) -> StackPacker:
    """Makes the fused packer of a pipeline; the pipeline itself if it cannot be fused on this host.

    ``known``: rows and levels of ``step_integers.rows_of``, predictors, and all elements' means.
    """
    turns = rope_tables(pipeline.shape, profile.ropes)
    kernels, packing = (kernels_for(pipeline.shape, profile.layout, x) for x in (KERNELS, PACKING))
    (rows,), coder = pipeline.after, pipeline.coder
    assert isinstance(rows, IntegerRows) and isinstance(coder, ClassCoder)
    if turns is None or kernels is None or packing is None or not rows.forward_tables[0].size:
        return pipeline
    factors = steps.panels if isinstance(steps, PredictedStep) else None
    tables = _tables(pipeline.shape, kernels, coder, *known, factors)
    parts = (packing, coder, rows, steps, known[0].scales, tables)
    fused = FusedSteps(pipeline, turns, kernels, *parts)
    return proven_or_pipeline(fused, profile.layout, wave_run(profile.layout), CODECS)


def _tables(
    shape: StackShape,
    kernels: ModuleType,
    coder: ClassCoder,
    rows: StepRows,
    levels: np.ndarray,
    predictors: Predictors,
    means: np.ndarray,
    factors: np.ndarray | None,
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
        factors=np.zeros((shape.num_units, 0, 0, columns), np.uint32)
        if factors is None
        else factors,
        finer=predictors.finer.astype(np.int32),
    )


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
