"""Runs ``FixedRate`` in one pass: the bytes of its pipeline, without an array between two stages.

Only where numba is installed, heads are multiples of 16 channels, and engines hold bf16 or fp32.
The pipeline handles all other cases, and every chunk with a row that must be stored unquantised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np

from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stacks.fused import (
    TRIED_AT,
    FusedPacker,
    aligned,
    kernels_for,
    padded,
    proven_or_pipeline,
    rope_tables,
    side_by_side,
)
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import OctaveGain, ends_of, pairs_of
from kvstore.codecs.stages.integer_klt import MAX_BITS, input_scale
from kvstore.shapes import DType, KVLayout, KVRun

CODECS = "fixed-rate codecs"  # in the log
KERNELS: Final = "kvstore.codecs.kernels.units.unpack_fixed_rate"
PACKING: Final = "kvstore.codecs.kernels.units.pack_fixed_rate"
COLUMNS, COMPONENTS = 32, 8  # the kernels need multiples of these


@dataclass(frozen=True, eq=False)
class RateTables:
    """The integers of all units, in the order in which kernels read them.

    ``runs``: int64 (units, MAX_BITS + 1): the number of components that have each number of bits.
    ``levels``: uint8 (units, components, magnitudes). ``matrix``: the basis that restores rows, in
    groups, uint32 (units, groups, columns); ``begins``: the initial values of its sums, int32
    (units, columns). ``encode``: the other basis, in pairs, uint32 (units, pairs, components);
    ``bounds``: int32, ``values``: fp32, both shaped like ``levels``; ``rates``: fp32 (units,
    components). ``means``: fp32 (units, columns). ``sizes``: fp32 (units, codes of gains);
    ``gains``: the same times the scale of the sums; ``ends``: int32, the largest size that gets
    each code, in steps.
    """

    runs: np.ndarray
    levels: np.ndarray
    matrix: np.ndarray
    begins: np.ndarray
    encode: np.ndarray
    bounds: np.ndarray
    values: np.ndarray
    rates: np.ndarray
    means: np.ndarray
    sizes: np.ndarray
    gains: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, eq=False)
class FusedRate(FusedPacker):
    """Packs and restores in one pass. Implements ``StackPacker``."""

    tables: RateTables
    num_planes: int

    def pack(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes | None:
        addresses = self.addresses(run, first, dtype)
        if addresses is None:
            return None
        shape, t = self.pipeline.shape, self.tables
        num_tokens = run[0][0].shape[1] - first
        pairs = np.empty((shape.num_units, pairs_of(num_tokens)), np.uint8)
        planes = np.empty(self.num_planes * -(-num_tokens // 8), np.uint8)
        sizes = (-(-shape.width // 2), np.float32(1 / shape.width), _scale_of(shape))
        units = (t.runs, t.encode, t.bounds, t.values, t.rates, t.means, t.ends, t.sizes)
        turns = self.turns.of(shape, first_token, num_tokens, dtype)
        scratch = self.packing.scratch_of(t.means.shape[1], t.rates.shape[1])
        if self.packing.pack(addresses, num_tokens, units, sizes, turns, pairs, planes, scratch):
            return b"".join([count_bytes(0), pairs.data, planes.data])
        return None

    def unpack(
        self,
        readers: Sequence[Reader],
        num_tokens: int,
        turns: tuple[object, ...],
        addresses: tuple[np.ndarray, np.ndarray],
    ) -> None:
        taken = [
            (
                reader.take("u1", self.pipeline.shape.num_units, pairs_of(num_tokens)),
                reader.take("u1", self.num_planes, -(-num_tokens // 8)),
            )
            for reader in readers
        ]
        pairs, planes = taken[0] if len(taken) == 1 else map(side_by_side, zip(*taken, strict=True))
        t, num_tokens = self.tables, len(readers) * num_tokens
        units = (t.runs, t.levels, t.matrix, t.begins, t.means, t.gains)
        scratch = self.restoring.scratch_of(t.begins.shape[1], t.levels.shape[1])
        self.restoring.unpack(
            planes.reshape(-1), num_tokens, units, pairs, turns, addresses, scratch
        )


def fused_rate(
    pipeline: Pipeline, profile: Profile, learned: Mapping[str, np.ndarray], gain: OctaveGain
) -> StackPacker:
    """Makes the fused packer of a pipeline; the pipeline itself if it cannot be fused on this host.

    ``learned``: the arrays of ``integers_of`` for these units, and the means of all elements.
    """
    shape, layout = pipeline.shape, profile.layout
    turns = rope_tables(shape, profile.ropes)
    usable = turns is not None and _are_usable(learned["bits"])
    kernels, packing = (kernels_for(shape, layout, x) for x in (KERNELS, PACKING))
    if turns is None or kernels is None or packing is None or not usable:
        return pipeline
    tables = _tables(shape, kernels, learned, gain)
    num_planes = int(learned["bits"].astype(np.int64).sum())
    fused = FusedRate(pipeline, turns, kernels, packing, tables, num_planes)
    return proven_or_pipeline(fused, layout, _plausible(pipeline, layout), CODECS)


def _plausible(pipeline: Pipeline, layout: KVLayout, num_tokens: int = 70) -> KVRun:
    """Returns a run, restored from a random payload, whose rows have sizes that kernels accept."""
    payload = np.random.default_rng(0).integers(0, 256, pipeline.nbytes(num_tokens), np.uint8)
    payload[:4] = 0  # no row is stored unquantised
    payload[4 : 4 + pipeline.gain.nbytes(num_tokens)] &= 0x77  # and none has a large gain
    run = layout.empty(num_tokens)
    pipeline.decode([Reader(payload.data)], run, 0, TRIED_AT, layout.dtype)
    return run


def _are_usable(bits: np.ndarray) -> bool:
    runs_down = bool(np.all(np.diff(bits.astype(np.int64), axis=1) <= 0))
    return runs_down and int(bits.max()) <= MAX_BITS


def _tables(
    shape: StackShape, kernels: ModuleType, learned: Mapping[str, np.ndarray], gain: OctaveGain
) -> RateTables:
    width = -(-shape.width // COLUMNS) * COLUMNS
    components = -(-learned["bits"].shape[1] // COMPONENTS) * COMPONENTS
    bits = learned["bits"].astype(np.int64)
    runs = np.stack([(bits == k).sum(axis=1) for k in range(MAX_BITS + 1)], axis=1)
    decode = padded(learned["decode"], components, width)
    encode = padded(learned["encode"], components, width)
    levels = padded(learned["levels"], components)
    means = learned["means"][shape.elements].astype(np.float32)
    units = padded(learned["units"].astype(np.float32), components)
    return RateTables(
        runs=runs.astype(np.int64),
        levels=aligned(levels),
        matrix=aligned(_groups(decode, kernels.GROUP)),
        begins=aligned(-kernels.OFFSET * decode.astype(np.int32).sum(axis=1, dtype=np.int32)),
        encode=aligned(_groups(encode.swapaxes(1, 2), 2)),
        bounds=aligned(padded(learned["bounds"], components)),
        values=aligned(levels.astype(np.float32) * units[:, :, None]),
        rates=aligned(padded(learned["rates"].astype(np.float32), components)),
        means=aligned(padded(means, width)),
        sizes=aligned(gain.table()),
        gains=aligned(gain.table() * learned["scales"][:, None].astype(np.float32)),
        ends=aligned(ends_of(gain.steps)),
    )


def _groups(rows: np.ndarray, size: int) -> np.ndarray:
    """Joins ``size`` consecutive rows into one, 32 bits a column: (units, rows / size, columns)."""
    units, count, columns = rows.shape
    kind = np.int8 if size == 4 else np.int16
    together = rows.reshape(units, count // size, size, columns).swapaxes(2, 3)
    grouped: np.ndarray = np.ascontiguousarray(together, kind).view(np.uint32)
    return grouped.reshape(units, count // size, columns)


def _scale_of(shape: StackShape) -> np.float32:
    return np.float32(input_scale(shape.width))
