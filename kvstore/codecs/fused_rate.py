"""``FixedRate`` in one pass: the bytes of its pieces, without an array between one and the next.

Only where numba is installed, heads are multiples of 16 channels, and engines hold bf16 or fp32;
the pieces do all else, and whole chunks with a row that has to be kept as it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.pieces.integer_klt import MAX_BITS, input_scale
from kvstore.codecs.pieces.octave_gain import OctaveGain
from kvstore.codecs.pieces.rope import Rope, angle_tables
from kvstore.codecs.pipeline import Pipeline, StackPart
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stacks import KEY, StackShape
from kvstore.errors import Corrupt
from kvstore.shapes import DType, KVLayout, KVRun

logger = logging.getLogger(__name__)
LINE = 64  # bytes
VECTOR = 16  # channels
COLUMNS, COMPONENTS = 64, 4  # what the kernels pad to


@dataclass(frozen=True, eq=False)
class Kernels:
    """Compiled functions, and what they want of a matrix."""

    unpack: Callable[..., None]
    pack: Callable[..., bool]
    places_of: Callable[[Sequence[np.ndarray]], np.ndarray]
    group: int  # components side by side
    offset: int  # added to levels


@dataclass(frozen=True, eq=False)
class Tables:
    """Of all units; ``runs`` says how many components have how many bits.

    levels: uint8 (units, components, magnitudes). matrix: groups of the basis to restore with,
    uint32 (units, groups, columns); begins: what its sums begin with, int32 (units, columns).
    encode: pairs of the other basis, uint32 (units, pairs, components); bounds: int32, values:
    fp32, like levels; rates: fp32 (units, components). means: fp32 (units, columns). gains: fp32
    (units, 256), times the scale of the sums. centres: int32 (units,).
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
    gains: np.ndarray
    centres: np.ndarray


@dataclass(frozen=True, eq=False)
class Turns:
    """``ropes`` in use; for each segment of a unit 0 or 1 more than the number of its rope."""

    ropes: tuple[Rope, ...]
    of_segment: np.ndarray
    halves: np.ndarray  # of the channels that a turn takes; none for the first

    def angles(self, first_token: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        return _angles(self.ropes, int(self.halves.max(initial=1)), first_token, num_tokens)


@dataclass(frozen=True, eq=False)
class FusedRate:
    """Implements ``StackPart``."""

    pieces: Pipeline
    tables: Tables
    turns: Turns
    num_planes: int
    kernels: Kernels

    def nbytes(self, num_tokens: int) -> int:
        return self.pieces.nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        segments = self._segments(run, first) if dtype != "float16" else None
        if segments is None:
            return self.pieces.encode(run, first, first_token, dtype)
        shape, t = self.pieces.shape, self.tables
        num_tokens = run[0][0].shape[1] - first
        codes = np.empty((shape.num_units, num_tokens), np.uint8)
        planes = np.empty(self.num_planes * -(-num_tokens // 8), np.uint8)
        sizes = (-(-shape.width // 2), np.float32(1 / shape.width), _scale_of(shape))
        units = (t.runs, t.encode, t.bounds, t.values, t.rates, t.means, t.centres)
        turns = self._turns(first_token, num_tokens, dtype)
        if self.kernels.pack(segments, num_tokens, units, sizes, turns, codes, planes):
            return b"".join([count_bytes(0), codes.data, planes.data])
        return self.pieces.encode(run, first, first_token, dtype)

    def decode(
        self, reader: Reader, out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        segments = self._segments(out, first) if dtype != "float16" else None
        if segments is None:
            return self.pieces.decode(reader, out, first, first_token, dtype)
        num_tokens = out[0][0].shape[1] - first
        kept, exact = self.pieces.read_kept(reader, num_tokens, dtype)
        codes = reader.take("u1", self.pieces.shape.num_units, num_tokens)
        if not codes.all():
            raise Corrupt("a gain is none that was written")
        planes = reader.take("u1", self.num_planes * -(-num_tokens // 8))
        t, turns = self.tables, self._turns(first_token, num_tokens, dtype)
        units = (t.runs, t.levels, t.matrix, t.begins, t.means, t.gains)
        self.kernels.unpack(planes, num_tokens, units, codes, turns, segments)
        self._put_kept(out, first, self.pieces.places(kept, num_tokens), exact, dtype)

    def _turns(self, first_token: int, num_tokens: int, dtype: DType) -> tuple[object, ...]:
        turns, dim = self.turns, self.pieces.shape.units[0][0].dim
        angles = turns.angles(first_token, num_tokens)
        return (turns.of_segment, turns.halves, *angles, dim, dtype == "float32")

    def _segments(self, run: KVRun, first: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Addresses of every segment's first row, and bytes from row to row.

        None if the values of a row do not lie side by side.
        """
        arrays = [array for pair in run for array in pair]
        starts, heads, tokens, values = self.kernels.places_of(arrays).T
        if np.any(values != arrays[0].itemsize):
            return None
        array, head = self._places_of_segments
        strides = tokens[array]
        return starts[array] + head * heads[array] + first * strides, strides

    @functools.cached_property
    def _places_of_segments(self) -> tuple[np.ndarray, np.ndarray]:
        units = self.pieces.shape.units
        pairs = np.array([[(s.array, s.head) for s in unit] for unit in units], np.int64)
        return pairs[..., 0].copy(), pairs[..., 1].copy()

    def _put_kept(
        self,
        out: KVRun,
        first: int,
        places: list[tuple[int, int, slice]],
        values: list[np.ndarray],
        dtype: DType,
    ) -> None:
        for (unit, token, _), row in zip(places, values, strict=True):
            narrow, at = floats.narrow(row, dtype), 0
            for segment in self.pieces.shape.units[unit]:
                target = out[segment.layer][segment.side][segment.head, first + token]
                target[:] = narrow[at : at + segment.dim]
                at += segment.dim


def fused_rate(
    pieces: Pipeline, profile: Profile, learned: Mapping[str, np.ndarray], gain: OctaveGain
) -> StackPart:
    """The pieces if they cannot be fused, or if this host's kernels disagree with them.

    ``learned``: what ``integers_of`` gave for these units, the gains' centres, and all means.
    """
    turns = _turns_of(pieces.shape, profile.ropes)
    usable = profile.layout.dtype != "float16" and _is_usable(pieces.shape, learned["bits"])
    kernels = _kernels() if turns is not None and usable else None
    if turns is None or kernels is None:
        return pieces
    tables = _tables(pieces.shape, kernels, learned, gain)
    num_planes = int(learned["bits"].astype(np.int64).sum())
    fused = FusedRate(pieces, tables, turns, num_planes, kernels)
    if agrees(fused, profile.layout):
        return fused
    logger.warning("the kernels of fixed-rate codecs are wrong on this host: using the pieces")
    return pieces


def agrees(fused: FusedRate, layout: KVLayout, num_tokens: int = 70) -> bool:
    """Same bytes and same rows as the pieces? A compiler is not to be trusted with a cache."""
    run, *outs = (layout.empty(num_tokens) for _ in range(3))
    for number, array in enumerate(x for pair in run for x in pair):
        ramp = np.arange(array.size, dtype=np.float32).reshape(array.shape) + number
        values = np.sin(ramp * ramp)
        array[:] = values if layout.dtype == "float32" else floats.narrow(values, layout.dtype)
    parts: tuple[StackPart, ...] = (fused, fused.pieces)
    payloads = [part.encode(run, 0, 9, layout.dtype) for part in parts]
    for part, out in zip(parts, outs, strict=True):
        for array in (x for pair in out for x in pair):
            array.fill(0)
        part.decode(Reader(memoryview(payloads[1])), out, 0, 9, layout.dtype)
    flat = [[x.tobytes() for pair in out for x in pair] for out in outs]
    return payloads[0] == payloads[1] and flat[0] == flat[1]


@functools.cache
def _kernels() -> Kernels | None:
    """Compiling takes seconds, once on a machine: only who packs shall pay for it."""
    try:
        from kvstore.codecs.kernels import addresses, dots, pack_units, unpack_units
    except ImportError as error:
        logger.info("fixed-rate codecs run in pieces, slower: %s", error)
        return None
    group, offset = dots.host().group, dots.host().offset
    return Kernels(unpack_units.unpack, pack_units.pack, addresses.places_of, group, offset)


def _is_usable(shape: StackShape, bits: np.ndarray) -> bool:
    dims = {segment.dim for unit in shape.units for segment in unit}
    runs_down = bool(np.all(np.diff(bits.astype(np.int64), axis=1) <= 0))
    return len(dims) == 1 and not min(dims) % VECTOR and runs_down and int(bits.max()) <= MAX_BITS


def _turns_of(shape: StackShape, ropes: Sequence[Rope | None]) -> Turns | None:
    """None if some channels are turned in a way that the kernels do not know."""
    used = tuple(dict.fromkeys(rope for rope in ropes if rope is not None))
    if any(rope.interleaved or len(rope.frequencies) % VECTOR for rope in used):
        return None
    numbers = {rope: number + 1 for number, rope in enumerate(used)}
    numbers_of = [
        [numbers[rope] if s.side == KEY and (rope := ropes[s.layer]) else 0 for s in unit]
        for unit in shape.units
    ]
    halves = np.array([0, *(len(rope.frequencies) for rope in used)], np.int64)
    return Turns(used, np.array(numbers_of, np.int64), halves)


def _tables(
    shape: StackShape, kernels: Kernels, learned: Mapping[str, np.ndarray], gain: OctaveGain
) -> Tables:
    width = -(-shape.width // COLUMNS) * COLUMNS
    components = -(-learned["bits"].shape[1] // COMPONENTS) * COMPONENTS
    bits = learned["bits"].astype(np.int64)
    runs = np.stack([(bits == k).sum(axis=1) for k in range(MAX_BITS + 1)], axis=1)
    decode = _padded(learned["decode"], components, width)
    encode = _padded(learned["encode"], components, width)
    levels = _padded(learned["levels"], components)
    means = learned["means"][shape.elements].astype(np.float32)
    units = _padded(learned["units"].astype(np.float32), components)
    return Tables(
        runs=runs.astype(np.int64),
        levels=_aligned(levels),
        matrix=_aligned(_groups(decode, kernels.group)),
        begins=_aligned(-kernels.offset * decode.astype(np.int32).sum(axis=1, dtype=np.int32)),
        encode=_aligned(_groups(encode.swapaxes(1, 2), 2)),
        bounds=_aligned(_padded(learned["bounds"], components)),
        values=_aligned(levels.astype(np.float32) * units[:, :, None]),
        rates=_aligned(_padded(learned["rates"].astype(np.float32), components)),
        means=_aligned(_padded(means, width)),
        gains=_aligned(gain.table() * learned["scales"][:, None].astype(np.float32)),
        centres=learned["gain_centres"].astype(np.int32).reshape(-1),
    )


def _groups(rows: np.ndarray, size: int) -> np.ndarray:
    """``size`` rows after another side by side in 32 bits: (units, rows / size, columns)."""
    units, count, columns = rows.shape
    kind = np.int8 if size == 4 else np.int16
    together = rows.reshape(units, count // size, size, columns).swapaxes(2, 3)
    grouped: np.ndarray = np.ascontiguousarray(together, kind).view(np.uint32)
    return grouped.reshape(units, count // size, columns)


def _padded(array: np.ndarray, *lengths: int) -> np.ndarray:
    """Zeros behind the axes after the first."""
    missing = [(0, length - have) for length, have in zip(lengths, array.shape[1:], strict=False)]
    rest = [(0, 0)] * (array.ndim - 1 - len(missing))
    return np.pad(array, [(0, 0), *missing, *rest])


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins with a line of the cache."""
    raw = np.empty(array.nbytes + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    copy: np.ndarray = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _scale_of(shape: StackShape) -> np.float32:
    return np.float32(input_scale(shape.width))


@functools.lru_cache(maxsize=256)
def _angles(
    ropes: tuple[Rope, ...], half: int, first_token: int, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, fp32 (ropes + 1, tokens, half)."""
    shape = (len(ropes) + 1, num_tokens, max(half, VECTOR))
    cosines, sines = _aligned(np.zeros(shape, np.float32)), _aligned(np.zeros(shape, np.float32))
    for number, rope in enumerate(ropes):
        cos, sin = angle_tables(rope, first_token, num_tokens)
        cosines[number + 1, :, : cos.shape[1]] = cos
        sines[number + 1, :, : sin.shape[1]] = sin
    return cosines, sines
