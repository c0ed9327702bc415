"""What codecs in one pass have in common: addresses of rows, turns, and a look at both ways."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.pieces.rope import Rope, angle_tables
from kvstore.codecs.pipeline import Pipeline, StackPart
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks import KEY, StackShape
from kvstore.shapes import DType, KVLayout, KVRun

logger = logging.getLogger(__name__)
K = TypeVar("K")  # kernels
LINE = 64  # bytes
VECTOR = 16  # channels

# Arrays of one dtype to addresses and strides, int64 (arrays, 4).
PlacesOf: TypeAlias = Callable[[Sequence[np.ndarray]], np.ndarray]


class Fused(StackPart, Protocol):
    @property
    def pieces(self) -> Pipeline: ...


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the heads of a stack's units lie in a run."""

    shape: StackShape
    places_of: PlacesOf

    def __call__(self, run: KVRun, first: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Addresses of every segment's first row, and bytes from row to row.

        None if the values of a row do not lie side by side.
        """
        arrays = [array for pair in run for array in pair]
        starts, heads, tokens, values = self.places_of(arrays).T
        if np.any(values != arrays[0].itemsize):
            return None
        array, head = self._numbers
        strides = tokens[array]
        return starts[array] + head * heads[array] + first * strides, strides

    @functools.cached_property
    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = np.array([[(s.array, s.head) for s in unit] for unit in self.shape.units], np.int64)
        return pairs[..., 0].copy(), pairs[..., 1].copy()


@dataclass(frozen=True, eq=False)
class Turns:
    """``ropes`` in use; for each segment of a unit 0 or 1 more than the number of its rope."""

    ropes: tuple[Rope, ...]
    of_segment: np.ndarray
    halves: np.ndarray  # of the channels that a turn takes; none for the first

    def of(
        self, shape: StackShape, first_token: int, num_tokens: int, dtype: DType
    ) -> tuple[object, ...]:
        """As kernels take them."""
        angles = _angles(self.ropes, int(self.halves.max(initial=1)), first_token, num_tokens)
        return (self.of_segment, self.halves, *angles, shape.units[0][0].dim, dtype == "float32")


def turns_of(shape: StackShape, ropes: Sequence[Rope | None]) -> Turns | None:
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


def has_vectors(shape: StackShape) -> bool:
    """Heads of one size, a multiple of what kernels take at a time."""
    dims = {segment.dim for unit in shape.units for segment in unit}
    return len(dims) == 1 and not min(dims) % VECTOR


def if_installed(load: Callable[[], K], codecs: str) -> K | None:
    """Compiling takes seconds, once on a machine: only who packs shall pay for it."""
    try:
        return load()
    except ImportError as error:
        logger.info("%s run in pieces, slower: %s", codecs, error)
        return None


def proven(fused: Fused, layout: KVLayout, run: KVRun, codecs: str) -> StackPart:
    """``fused``, or its pieces if it disagrees with them about ``run``."""
    if agrees(fused, layout, run):
        return fused
    logger.warning("the kernels of %s are wrong on this host: using the pieces", codecs)
    return fused.pieces


def agrees(fused: Fused, layout: KVLayout, run: KVRun) -> bool:
    """Same bytes and same rows as the pieces? A compiler is not to be trusted with a cache."""
    outs = [layout.empty(run[0][0].shape[1]) for _ in range(2)]
    parts: tuple[StackPart, ...] = (fused, fused.pieces)
    payloads = [part.encode(run, 0, 9, layout.dtype) for part in parts]
    for part, out in zip(parts, outs, strict=True):
        for array in (x for pair in out for x in pair):
            array.fill(0)
        part.decode(Reader(memoryview(payloads[1])), out, 0, 9, layout.dtype)
    flat = [[x.tobytes() for pair in out for x in pair] for out in outs]
    return payloads[0] == payloads[1] and flat[0] == flat[1]


def waves(layout: KVLayout, num_tokens: int = 70) -> KVRun:
    """Rows of all kinds."""
    run = layout.empty(num_tokens)
    for number, array in enumerate(x for pair in run for x in pair):
        ramp = np.arange(array.size, dtype=np.float32).reshape(array.shape) + number
        values = np.sin(ramp * ramp)
        array[:] = values if layout.dtype == "float32" else floats.narrow(values, layout.dtype)
    return run


def padded(array: np.ndarray, *lengths: int) -> np.ndarray:
    """Zeros behind the axes after the first."""
    missing = [(0, length - have) for length, have in zip(lengths, array.shape[1:], strict=False)]
    rest = [(0, 0)] * (array.ndim - 1 - len(missing))
    return np.pad(array, [(0, 0), *missing, *rest])


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins with a line of the cache."""
    raw = np.empty(array.nbytes + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    copy: np.ndarray = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@functools.lru_cache(maxsize=64)  # megabytes each where chunks and heads are large
def _angles(
    ropes: tuple[Rope, ...], half: int, first_token: int, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, fp32 (ropes + 1, tokens, half)."""
    shape = (len(ropes) + 1, num_tokens, max(half, VECTOR))
    cosines, sines = aligned(np.zeros(shape, np.float32)), aligned(np.zeros(shape, np.float32))
    for number, rope in enumerate(ropes):
        cos, sin = angle_tables(rope, first_token, num_tokens)
        cosines[number + 1, :, : cos.shape[1]] = cos
        sines[number + 1, :, : sin.shape[1]] = sin
    return cosines, sines
