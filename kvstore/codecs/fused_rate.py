"""``FixedRate`` in one pass: the bytes of its pieces, without an array between one and the next.

Only where numba is installed, heads are multiples of 16 channels, and engines hold bf16 or fp32;
the pieces do all else, and whole chunks with a row that has to be kept as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
)
from kvstore.codecs.pieces.integer_klt import MAX_BITS, input_scale
from kvstore.codecs.pieces.octave_gain import OctaveGain, ends_of, pairs_of
from kvstore.codecs.pipeline import Pipeline, StackPart
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stacks import StackShape
from kvstore.shapes import DType, KVLayout, KVRun

CODECS = "fixed-rate codecs"  # in the log
COLUMNS, COMPONENTS = 64, 4  # what the kernels pad to


@dataclass(frozen=True, eq=False)
class Kernels:
    """Compiled functions, and what they want of a matrix."""

    unpack: Callable[..., None]
    pack: Callable[..., bool]
    places_of: PlacesOf
    group: int  # components side by side
    offset: int  # added to levels


@dataclass(frozen=True, eq=False)
class Tables:
    """Of all units; ``runs`` says how many components have how many bits.

    levels: uint8 (units, components, magnitudes). matrix: groups of the basis to restore with,
    uint32 (units, groups, columns); begins: what its sums begin with, int32 (units, columns).
    encode: pairs of the other basis, uint32 (units, pairs, components); bounds: int32, values:
    fp32, like levels; rates: fp32 (units, components). means: fp32 (units, columns). sizes: fp32
    (units, codes of gains), gains: the same times the scale of the sums, ends: int32, the most
    steps that each code takes.
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
    """Implements ``StackPart``."""

    pieces: Pipeline
    tables: Tables
    turns: Turns
    segments: Segments
    num_planes: int
    kernels: Kernels

    def nbytes(self, num_tokens: int) -> int:
        return self.pieces.nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        segments = self.segments(run, first) if dtype != "float16" else None
        if segments is None:
            return self.pieces.encode(run, first, first_token, dtype)
        shape, t = self.pieces.shape, self.tables
        num_tokens = run[0][0].shape[1] - first
        pairs = np.empty((shape.num_units, pairs_of(num_tokens)), np.uint8)
        planes = np.empty(self.num_planes * -(-num_tokens // 8), np.uint8)
        sizes = (-(-shape.width // 2), np.float32(1 / shape.width), _scale_of(shape))
        units = (t.runs, t.encode, t.bounds, t.values, t.rates, t.means, t.ends, t.sizes)
        turns = self.turns.of(shape, first_token, num_tokens, dtype)
        if self.kernels.pack(segments, num_tokens, units, sizes, turns, pairs, planes):
            return b"".join([count_bytes(0), pairs.data, planes.data])
        return self.pieces.encode(run, first, first_token, dtype)

    def decode(
        self, reader: Reader, out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        segments = self.segments(out, first) if dtype != "float16" else None
        if segments is None:
            return self.pieces.decode(reader, out, first, first_token, dtype)
        num_tokens = out[0][0].shape[1] - first
        kept, exact = self.pieces.read_kept(reader, num_tokens)
        pairs = reader.take("u1", self.pieces.shape.num_units, pairs_of(num_tokens))
        planes = reader.take("u1", self.num_planes * -(-num_tokens // 8))
        t, turns = self.tables, self.turns.of(self.pieces.shape, first_token, num_tokens, dtype)
        units = (t.runs, t.levels, t.matrix, t.begins, t.means, t.gains)
        self.kernels.unpack(planes, num_tokens, units, pairs, turns, segments)
        self.pieces.put_kept(out, first, kept, exact, dtype)


def fused_rate(
    pieces: Pipeline, profile: Profile, learned: Mapping[str, np.ndarray], gain: OctaveGain
) -> StackPart:
    """The pieces if they cannot be fused, or if this host's kernels disagree with them.

    ``learned``: what ``integers_of`` gave for these units, and all means.
    """
    turns = turns_of(pieces.shape, profile.ropes)
    usable = profile.layout.dtype != "float16" and _is_usable(pieces.shape, learned["bits"])
    kernels = _kernels() if turns is not None and usable else None
    if turns is None or kernels is None:
        return pieces
    tables = _tables(pieces.shape, kernels, learned, gain)
    num_planes = int(learned["bits"].astype(np.int64).sum())
    segments = Segments(pieces.shape, kernels.places_of)
    fused = FusedRate(pieces, tables, turns, segments, num_planes, kernels)
    return proven(fused, profile.layout, _plausible(pieces, profile.layout), CODECS)


def _plausible(pieces: Pipeline, layout: KVLayout, num_tokens: int = 70) -> KVRun:
    """What some payload restores to: rows of sizes that the kernels take."""
    payload = np.random.default_rng(0).integers(0, 256, pieces.nbytes(num_tokens), np.uint8)
    payload[:4] = 0  # no row is kept
    payload[4 : 4 + pieces.gain.nbytes(num_tokens)] &= 0x77  # nor among the largest
    run = layout.empty(num_tokens)
    pieces.decode(Reader(payload.data), run, 0, 9, layout.dtype)
    return run


@functools.cache
def _kernels() -> Kernels | None:
    return if_installed(_load_kernels, CODECS)


def _load_kernels() -> Kernels:
    from kvstore.codecs.kernels import addresses, dots, pack_units, unpack_units

    group, offset = dots.host().group, dots.host().offset
    return Kernels(unpack_units.unpack, pack_units.pack, addresses.places_of, group, offset)


def _is_usable(shape: StackShape, bits: np.ndarray) -> bool:
    runs_down = bool(np.all(np.diff(bits.astype(np.int64), axis=1) <= 0))
    return has_vectors(shape) and runs_down and int(bits.max()) <= MAX_BITS


def _tables(
    shape: StackShape, kernels: Kernels, learned: Mapping[str, np.ndarray], gain: OctaveGain
) -> Tables:
    width = -(-shape.width // COLUMNS) * COLUMNS
    components = -(-learned["bits"].shape[1] // COMPONENTS) * COMPONENTS
    bits = learned["bits"].astype(np.int64)
    runs = np.stack([(bits == k).sum(axis=1) for k in range(MAX_BITS + 1)], axis=1)
    decode = padded(learned["decode"], components, width)
    encode = padded(learned["encode"], components, width)
    levels = padded(learned["levels"], components)
    means = learned["means"][shape.elements].astype(np.float32)
    units = padded(learned["units"].astype(np.float32), components)
    return Tables(
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
    """``size`` rows after another side by side in 32 bits: (units, rows / size, columns)."""
    units, count, columns = rows.shape
    kind = np.int8 if size == 4 else np.int16
    together = rows.reshape(units, count // size, size, columns).swapaxes(2, 3)
    grouped: np.ndarray = np.ascontiguousarray(together, kind).view(np.uint32)
    return grouped.reshape(units, count // size, columns)


def _scale_of(shape: StackShape) -> np.float32:
    return np.float32(input_scale(shape.width))
