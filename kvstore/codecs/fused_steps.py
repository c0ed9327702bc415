"""``OneStep`` restored in one pass behind the entropy decoder: the rows of its pieces, quicker.

Only where numba is installed, the host multiplies small integers, heads are multiples of 16
channels, and engines hold bf16 or fp32; the pieces do all else. Packing is theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.fused_parts import (
    PlacesOf,
    Segments,
    Turns,
    aligned,
    has_vectors,
    if_installed,
    padded,
    proven,
    turns_of,
    waves,
)
from kvstore.codecs.pieces.class_coder import ClassCoder
from kvstore.codecs.pieces.integer_rows import StepRows
from kvstore.codecs.pieces.prediction import Predictors
from kvstore.codecs.pipeline import Pipeline, StackPart
from kvstore.codecs.products import panels_of
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks import StackShape
from kvstore.shapes import DType, KVRun

CODECS = "one-step codecs"  # in the log


@dataclass(frozen=True, eq=False)
class Kernels:
    """A compiled function, and what it wants of a matrix."""

    unpack: Callable[..., None]
    places_of: PlacesOf
    group: int  # narrow components side by side
    offset: int  # added to their levels
    columns: int  # of a panel


@dataclass(frozen=True, eq=False)
class Tables:
    """Of all units.

    coded: int32 (coded components, 9), see ``kernels.step_levels``; first_rows: int64 (units + 1,),
    of each unit's. counts: int32 (units, 3). wide, matrix: uint32 (units, panels, groups, columns):
    two wide or some other components side by side; begins: what their sums begin with, int32
    (units, panels, columns). rows: int8 (units, components, width). means: fp32 (units, width).
    parts: of each segment, int64. factors: uint32 (units, panels, pairs, columns), of two known
    components side by side, and finer: int32 (units, components): see ``Predictors``.
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
    """Implements ``StackPart``."""

    pieces: Pipeline
    coder: ClassCoder
    scales: np.ndarray
    tables: Tables
    turns: Turns
    segments: Segments
    kernels: Kernels

    def nbytes(self, num_tokens: int) -> int:
        return self.pieces.nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        return self.pieces.encode(run, first, first_token, dtype)

    def decode(
        self, reader: Reader, out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        segments = self.segments(out, first) if dtype != "float16" else None
        if segments is None:
            return self.pieces.decode(reader, out, first, first_token, dtype)
        num_tokens = out[0][0].shape[1] - first
        kept, exact = self.pieces.read_kept(reader, num_tokens)
        gains = self.pieces.gain.read(reader, num_tokens) * self.scales[:, None, None]
        read = self.coder.read_coded(reader, num_tokens)
        t, turns = self.tables, self.turns.of(self.pieces.shape, first_token, num_tokens, dtype)
        coded = (read.symbols, np.ascontiguousarray(read.low), read.rare, t.coded)
        units = (t.counts, t.wide, t.matrix, t.begins, t.rows, t.means, t.parts)
        by_part = np.ascontiguousarray(gains.swapaxes(1, 2), np.float32)
        told = (t.factors, t.finer)
        self.kernels.unpack(coded, t.first_rows, units, told, by_part, turns, segments)
        self.pieces.put_kept(out, first, kept, exact, dtype)


def fused_steps(
    pieces: Pipeline,
    coder: ClassCoder,
    profile: Profile,
    known: tuple[StepRows, np.ndarray, Predictors, np.ndarray],
) -> StackPart:
    """The pieces if they cannot be fused, or if this host's kernels disagree with them.

    ``known``: rows and levels of ``step_design.rows_of``, predictors, and all means.
    """
    turns = turns_of(pieces.shape, profile.ropes)
    usable = profile.layout.dtype != "float16" and has_vectors(pieces.shape)
    kernels = _kernels() if turns is not None and usable else None
    if turns is None or kernels is None:
        return pieces
    tables = _tables(pieces.shape, kernels, coder, *known)
    segments = Segments(pieces.shape, kernels.places_of)
    fused = FusedSteps(pieces, coder, known[0].scales, tables, turns, segments, kernels)
    return proven(fused, profile.layout, waves(profile.layout), CODECS)


@functools.cache
def _kernels() -> Kernels | None:
    return if_installed(_load_kernels, CODECS)


def _load_kernels() -> Kernels:
    from kvstore.codecs.kernels import addresses, dots, step_units

    host = dots.host()
    known = (host.group, host.offset, host.tile_columns)
    return Kernels(step_units.unpack, addresses.places_of, *known)


def _tables(
    shape: StackShape,
    kernels: Kernels,
    coder: ClassCoder,
    rows: StepRows,
    levels: np.ndarray,
    predictors: Predictors,
    means: np.ndarray,
) -> Tables:
    live, symbols = coder.rows
    units, places = np.divmod(live, levels.shape[1])
    known = [np.stack([units, places], axis=1), symbols, levels[units, places]]
    matrix = _panels(shape, kernels.columns, rows.rows, kernels.group)
    sums = _panels(shape, kernels.columns, rows.rows.sum(axis=1, keepdims=True, dtype=np.int32), 1)
    starts = [part.start for part in shape.parts]
    return Tables(
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
    """``size`` rows after another side by side in 32 bits, columns of segments padded to panels:
    uint32 (units, panels, groups, columns)."""
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
