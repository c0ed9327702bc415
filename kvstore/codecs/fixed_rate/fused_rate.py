"""Runs the stages of ``FixedRate`` in one pass, without an array between two stages.

The bytes are those of the pipeline. Kernels are used only where numba is installed, heads are
multiples of 16 channels, and engines hold bf16 or fp32. The pipeline handles all other cases, and
every chunk with a row that must be stored unquantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np

from kvstore.codecs.fixed_rate.rate_integers import RateIntegers
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
from kvstore.shapes import DType, KVLayout, KVRun, Rope

CODECS = "fixed-rate codecs"  # in the log
KERNELS: Final = "kvstore.codecs.kernels.units.unpack_fixed_rate"
PACKING: Final = "kvstore.codecs.kernels.units.pack_fixed_rate"
COLUMNS, COMPONENTS = 32, 8  # the kernels need multiples of these


@dataclass(frozen=True, eq=False, kw_only=True)
class RatePipeline(Pipeline):
    """The stages of one stack, and the arrays from which they were made.

    ``means``: fp32 (elements of a token,), of keys without RoPE. ``ropes``: one for each layer,
    None for a layer without RoPE.
    """

    gain: OctaveGain
    integers: RateIntegers
    means: np.ndarray
    ropes: tuple[Rope | None, ...]


@dataclass(frozen=True, eq=False)
class FusedRate(FusedPacker):
    """Packs and restores a stack of a fixed-rate preset in one pass. Implements ``StackPacker``.

    ``restoring_tables``, ``packing_tables``: the integers of all units, in the order in which
    kernels read them; see ``_tables``. ``room``: the numbers of columns and components, padded for
    kernels. ``num_planes``: the bits of a token, over all units and components.
    """

    restoring_tables: tuple[np.ndarray, ...]
    packing_tables: tuple[np.ndarray, ...]
    room: tuple[int, int]
    num_planes: int

    def pack(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes | None:
        addresses = self.addresses(run, first, dtype)
        if addresses is None:
            return None
        shape, num_tokens = self.pipeline.shape, run[0][0].shape[1] - first
        pairs = np.empty((shape.num_units, pairs_of(num_tokens)), np.uint8)
        planes = np.empty(self.num_planes * -(-num_tokens // 8), np.uint8)
        sizes = (-(-shape.width // 2), np.float32(1 / shape.width), _scale_of(shape))
        turns = self.turns.of(shape, first_token, num_tokens, dtype)
        scratch, units = self.packing.scratch_of(*self.room), self.packing_tables
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
        self.restoring.unpack(
            planes.reshape(-1),
            len(readers) * num_tokens,
            self.restoring_tables,
            pairs,
            turns,
            addresses,
            self.restoring.scratch_of(*self.room),
        )


def fused_rate(pipeline: RatePipeline, layout: KVLayout) -> StackPacker:
    """Return the fused packer of a pipeline; the pipeline itself if this host cannot fuse it.

    ``layout``: the layout of the whole model.
    """
    shape, bits = pipeline.shape, pipeline.integers.bits.astype(np.int64)
    turns = rope_tables(shape, pipeline.ropes)
    kernels, packing = (kernels_for(shape, layout, x) for x in (KERNELS, PACKING))
    usable = bool(np.all(np.diff(bits, axis=1) <= 0)) and int(bits.max()) <= MAX_BITS
    if turns is None or kernels is None or packing is None or not usable:
        return pipeline
    room = (_padded_to(COLUMNS, shape.width), _padded_to(COMPONENTS, bits.shape[1]))
    tables = _tables(pipeline, kernels, room)
    fused = FusedRate(pipeline, turns, kernels, packing, *tables, room, int(bits.sum()))
    return proven_or_pipeline(fused, layout, _plausible(pipeline, layout), CODECS)


def _padded_to(multiple: int, length: int) -> int:
    return -(-length // multiple) * multiple


def _plausible(pipeline: Pipeline, layout: KVLayout, num_tokens: int = 70) -> KVRun:
    """Return a run, restored from a random payload, whose rows have sizes that kernels accept."""
    payload = np.random.default_rng(0).integers(0, 256, pipeline.nbytes(num_tokens), np.uint8)
    payload[:4] = 0  # no row is stored unquantised
    payload[4 : 4 + pipeline.gain.nbytes(num_tokens)] &= 0x77  # and none has a large gain
    run = layout.empty(num_tokens)
    pipeline.decode([Reader(payload.data)], run, 0, TRIED_AT, layout.dtype)
    return run


def _tables(
    pipeline: RatePipeline, kernels: ModuleType, room: tuple[int, int]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return the tables for restoring and those for packing, in the order in which kernels read.

    ``runs``: int64 (units, MAX_BITS + 1): the number of components that have each number of bits.
    ``levels``: uint8 (units, components, magnitudes). ``matrix``: the basis that restores rows, in
    groups, uint32 (units, groups, columns); ``begins``: the initial values of its sums, int32
    (units, columns). ``means``: fp32 (units, columns). ``sizes``: fp32 (units, codes of gains);
    ``gains``: the same times the scale of the sums; ``ends``: int32, the largest size that gets
    each code, in steps. ``encoding``: the other basis, in pairs, uint32 (units, pairs, components);
    ``bounds``: int32, ``values``: fp32, both shaped like ``levels``; ``rates``: fp32 (units,
    components).
    """
    i, gain, (width, components) = pipeline.integers, pipeline.gain, room
    decode, encode = (padded(x, components, width) for x in (i.decode, i.encode))
    by_bits = [(i.bits == k).sum(axis=1) for k in range(MAX_BITS + 1)]
    runs, levels = np.stack(by_bits, axis=1).astype(np.int64), padded(i.levels, components)
    begins = -kernels.OFFSET * decode.astype(np.int32).sum(axis=1, dtype=np.int32)
    means = padded(pipeline.means[pipeline.shape.elements].astype(np.float32), width)
    sizes, ends = gain.table(), ends_of(gain.steps)
    gains = sizes * i.scales[:, None].astype(np.float32)
    values = levels.astype(np.float32) * padded(i.units.astype(np.float32), components)[:, :, None]
    rates, bounds = padded(i.rates.astype(np.float32), components), padded(i.bounds, components)
    matrix, encoding = _groups(decode, kernels.GROUP), _groups(encode.swapaxes(1, 2), 2)
    restoring = map(aligned, (levels, matrix, begins, means, gains))
    packing = map(aligned, (encoding, bounds, values, rates, means, ends, sizes))
    return (runs, *restoring), (runs, *packing)


def _groups(rows: np.ndarray, size: int) -> np.ndarray:
    """Join ``size`` rows into one of 32 bits a column: uint32 (units, rows / size, columns)."""
    units, count, columns = rows.shape
    kind = np.int8 if size == 4 else np.int16
    together = rows.reshape(units, count // size, size, columns).swapaxes(2, 3)
    grouped: np.ndarray = np.ascontiguousarray(together, kind).view(np.uint32)
    return grouped.reshape(units, count // size, columns)


def _scale_of(shape: StackShape) -> np.float32:
    return np.float32(input_scale(shape.width))
