"""Runs ``FixedRate`` in one pass: the bytes of its pipeline, without an array between two stages.

Only where numba is installed, heads are multiples of 16 channels, and engines hold bf16 or fp32.
The pipeline handles all other cases, and every chunk with a row that must be stored unquantised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader, count_bytes
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
)
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.integer_klt import MAX_BITS, input_scale
from kvstore.codecs.stages.octave_gain import OctaveGain, ends_of, pairs_of
from kvstore.shapes import DType, KVLayout, KVRun

CODECS = "fixed-rate codecs"  # in the log
COLUMNS, COMPONENTS = 64, 4  # the kernels need multiples of these


@dataclass(frozen=True, eq=False)
class RateKernels:
    """Compiled functions, and the matrix layout that they require."""

    unpack: Callable[..., None]
    pack: Callable[..., bool]
    addresses_of: AddressesOf
    group: int  # components in one 32-bit group
    offset: int  # added to levels


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
class FusedRate:
    """Packs and restores in one pass. Implements ``StackPacker``."""

    pipeline: Pipeline
    tables: RateTables
    turns: RopeTables
    addresses: HeadAddresses
    num_planes: int
    kernels: RateKernels

    def nbytes(self, num_tokens: int) -> int:
        return self.pipeline.nbytes(num_tokens)

    def least_nbytes(self, num_tokens: int) -> int:
        return self.pipeline.least_nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        addresses = self.addresses(run, first) if dtype != "float16" else None
        if addresses is None:
            return self.pipeline.encode(run, first, first_token, dtype)
        shape, t = self.pipeline.shape, self.tables
        num_tokens = run[0][0].shape[1] - first
        pairs = np.empty((shape.num_units, pairs_of(num_tokens)), np.uint8)
        planes = np.empty(self.num_planes * -(-num_tokens // 8), np.uint8)
        sizes = (-(-shape.width // 2), np.float32(1 / shape.width), _scale_of(shape))
        units = (t.runs, t.encode, t.bounds, t.values, t.rates, t.means, t.ends, t.sizes)
        turns = self.turns.of(shape, first_token, num_tokens, dtype)
        if self.kernels.pack(addresses, num_tokens, units, sizes, turns, pairs, planes):
            return b"".join([count_bytes(0), pairs.data, planes.data])
        return self.pipeline.encode(run, first, first_token, dtype)

    def decode(
        self, reader: Reader, out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        addresses = self.addresses(out, first) if dtype != "float16" else None
        if addresses is None:
            return self.pipeline.decode(reader, out, first, first_token, dtype)
        num_tokens = out[0][0].shape[1] - first
        kept, exact = self.pipeline.read_kept(reader, num_tokens)
        pairs = reader.take("u1", self.pipeline.shape.num_units, pairs_of(num_tokens))
        planes = reader.take("u1", self.num_planes * -(-num_tokens // 8))
        t, turns = self.tables, self.turns.of(self.pipeline.shape, first_token, num_tokens, dtype)
        units = (t.runs, t.levels, t.matrix, t.begins, t.means, t.gains)
        self.kernels.unpack(planes, num_tokens, units, pairs, turns, addresses)
        self.pipeline.put_kept(out, first, kept, exact, dtype)


def fused_rate(
    pipeline: Pipeline, profile: Profile, learned: Mapping[str, np.ndarray], gain: OctaveGain
) -> StackPacker:
    """Makes the fused packer of a pipeline; the pipeline itself if it cannot be fused on this host.

    ``learned``: the arrays of ``integers_of`` for these units, and the means of all elements.
    """
    turns = rope_tables(pipeline.shape, profile.ropes)
    usable = profile.layout.dtype != "float16" and _is_usable(pipeline.shape, learned["bits"])
    kernels = _kernels() if turns is not None and usable else None
    if turns is None or kernels is None:
        return pipeline
    tables = _tables(pipeline.shape, kernels, learned, gain)
    num_planes = int(learned["bits"].astype(np.int64).sum())
    addresses = HeadAddresses(pipeline.shape, kernels.addresses_of)
    fused = FusedRate(pipeline, tables, turns, addresses, num_planes, kernels)
    return proven_or_pipeline(fused, profile.layout, _plausible(pipeline, profile.layout), CODECS)


def _plausible(pipeline: Pipeline, layout: KVLayout, num_tokens: int = 70) -> KVRun:
    """Returns a run, restored from a random payload, whose rows have sizes that kernels accept."""
    payload = np.random.default_rng(0).integers(0, 256, pipeline.nbytes(num_tokens), np.uint8)
    payload[:4] = 0  # no row is stored unquantised
    payload[4 : 4 + pipeline.gain.nbytes(num_tokens)] &= 0x77  # and none has a large gain
    run = layout.empty(num_tokens)
    pipeline.decode(Reader(payload.data), run, 0, 9, layout.dtype)
    return run


@functools.cache
def _kernels() -> RateKernels | None:
    return if_installed(_load_kernels, CODECS)


def _load_kernels() -> RateKernels:
    from kvstore.codecs.kernels.emit import dots
    from kvstore.codecs.kernels.units import kernel_parts, pack_fixed_rate, unpack_fixed_rate

    host, pack = dots.host_vectors(), pack_fixed_rate.pack
    addresses_of = kernel_parts.addresses_of
    return RateKernels(unpack_fixed_rate.unpack, pack, addresses_of, host.group, host.offset)


def _is_usable(shape: StackShape, bits: np.ndarray) -> bool:
    runs_down = bool(np.all(np.diff(bits.astype(np.int64), axis=1) <= 0))
    return fits_vector_units(shape) and runs_down and int(bits.max()) <= MAX_BITS


def _tables(
    shape: StackShape, kernels: RateKernels, learned: Mapping[str, np.ndarray], gain: OctaveGain
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
        matrix=aligned(_groups(decode, kernels.group)),
        begins=aligned(-kernels.offset * decode.astype(np.int32).sum(axis=1, dtype=np.int32)),
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
