"""Common parts of codecs that pack in one pass: addresses of rows, RoPE tables, and a check.

A *fused* packer runs all stages of a pipeline at once, in a compiled kernel. Before it is used, it
must give the same bytes and rows as the pipeline.

Restoring and packing are compiled and proven one after the other. A server must restore from its
start on, but packing can wait: until then the pipeline packs (``packing_later``).
"""

from __future__ import annotations

import functools
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Final, TypeAlias, TypeVar

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.loops.compiled import compiled_module, is_proven
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.shapes import DType, KVLayout, KVRun, Rope, angle_tables, slice_tokens

T = TypeVar("T")

LINE = 64  # bytes
VECTOR = 16  # channels
TRIED_AT = 9  # the token at which kernels are compared with their pipeline
# Takes a call that compiles, and makes it now or later.
Compile: TypeAlias = Callable[[Callable[[], None]], object]
_WITH_KERNELS: Final[ContextVar[bool]] = ContextVar("_WITH_KERNELS", default=True)


@dataclass(frozen=True, eq=False)
class RopeTables:
    """The rotations (RoPE) of a stack's keys, in the form that kernels take.

    ``ropes``: those in use. ``of_vector``: int64 (units, vectors of a unit): 0 = no RoPE, else the
    index of the rope plus 1. ``halves``: int64 (ropes + 1,): the number of pairs of channels that
    each rotates.
    """

    ropes: tuple[Rope, ...]
    of_vector: np.ndarray
    halves: np.ndarray

    def of(
        self, shape: StackShape, first_token: int, num_tokens: int, dtype: DType
    ) -> tuple[object, ...]:
        """Return a kernel's arguments for ``num_tokens`` tokens from ``first_token`` on."""
        angles = _angles(self.ropes, int(self.halves.max(initial=1)), first_token, num_tokens)
        return (self.of_vector, self.halves, *angles, shape.units[0][0].dim, dtype == "float32")


def rope_tables(shape: StackShape, ropes: Sequence[Rope | None]) -> RopeTables | None:
    """Return the tables, or None if kernels do not support one of the rotations."""
    of_units = [[vector.rope(ropes) for vector in unit] for unit in shape.units]
    used = tuple(dict.fromkeys(rope for unit in of_units for rope in unit if rope is not None))
    if any(rope.interleaved or len(rope.frequencies) < VECTOR for rope in used):
        return None
    numbers = {None: 0} | {rope: number + 1 for number, rope in enumerate(used)}
    numbers_of = [[numbers[rope] for rope in unit] for unit in of_units]
    halves = np.array([0, *(len(rope.frequencies) for rope in used)], np.int64)
    return RopeTables(used, np.array(numbers_of, np.int64), halves)


def fits_vector_units(shape: StackShape) -> bool:
    """Return whether all heads have one size, and that is a multiple of ``VECTOR``."""
    dims = {segment.dim for unit in shape.units for segment in unit}
    return len(dims) == 1 and not min(dims) % VECTOR


@dataclass(frozen=True, eq=False)
class FusedPacker(ABC):
    """Runs all stages of its pipeline in one pass.

    ``pipeline`` is the definition, and handles the cases that the kernels cannot. ``restoring``,
    ``packing``: modules of kernels. ``packing_is_proven``: until it is set, the pipeline packs.
    """

    pipeline: Pipeline
    turns: RopeTables
    restoring: ModuleType
    packing: ModuleType
    packing_is_proven: threading.Event = field(default_factory=threading.Event, kw_only=True)

    def nbytes(self, num_tokens: int) -> int:
        return self.pipeline.nbytes(num_tokens)

    def least_nbytes(self, num_tokens: int) -> int:
        return self.pipeline.least_nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        packed = None
        if self.packing_is_proven.is_set():
            packed = self.pack(run, first, first_token, dtype)
        if packed is None:
            return self.pipeline.encode(run, first, first_token, dtype)
        return packed

    def decode(
        self, readers: Sequence[Reader], out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        addresses = self.addresses(out, first, dtype)
        if addresses is None:
            return self.pipeline.decode(readers, out, first, first_token, dtype)
        num_tokens = out[0][0].shape[1] - first
        size = num_tokens // len(readers)
        kept = [self.pipeline.read_kept(reader, size) for reader in readers]
        turns = self.turns.of(self.pipeline.shape, first_token, num_tokens, dtype)
        self.unpack(readers, size, turns, addresses)
        for number, (places, exact) in enumerate(kept):
            if len(exact):
                begin = first + number * size
                rows = slice_tokens(out, begin, begin + size)
                self.pipeline.put_kept(rows, places, exact, dtype)

    def addresses(
        self, run: KVRun, first: int, dtype: DType
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the address of every head's row of token ``first``, and the bytes between rows.

        Both are int64 (units, vectors of a unit). Returns None if no kernel can read the rows: they
        are fp16, or their values are not contiguous.
        """
        if dtype == "float16":
            return None
        arrays = [array for pair in run for array in pair]
        starts, heads, tokens, values = self.restoring.places_of(arrays).T[:4]
        if np.any(values != arrays[0].itemsize):
            return None
        array, head = self._heads
        strides = tokens[array]
        return starts[array] + head * heads[array] + first * strides, strides

    @functools.cached_property
    def _heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The arrays and the heads of all vectors, int64 (units, vectors of a unit)."""
        units = self.pipeline.shape.units
        pairs = np.array([[(s.array, s.head) for s in unit] for unit in units], np.int64)
        return pairs[..., 0].copy(), pairs[..., 1].copy()

    @abstractmethod
    def pack(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes | None:
        """Return what the pipeline returns; None if the kernel cannot pack these rows."""

    @abstractmethod
    def unpack(
        self,
        readers: Sequence[Reader],
        num_tokens: int,
        turns: tuple[object, ...],
        addresses: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Restore the quantised rows of payloads, whose kept rows ``readers`` have already passed.

        ``num_tokens``: the tokens of each payload.
        """


def kernels_for(shape: StackShape, layout: KVLayout, name: str) -> ModuleType | None:
    """Import the module ``name``; return None without numba, or if its kernels do not fit.

    Compiling takes seconds, once per machine: only a process that packs should pay for it.
    """
    fits = layout.dtype != "float16" and fits_vector_units(shape)
    return compiled_module(name) if fits and _WITH_KERNELS.get() else None


# Runs the call that compiles packing: at once, unless ``packing_later`` has set something else.
_COMPILE_PACKING: Final[ContextVar[Compile]] = ContextVar("_COMPILE_PACKING", default=operator.call)


def for_sizes_alone() -> AbstractContextManager[None]:
    """Return a context in which opened codecs only give sizes: no kernel is compiled."""
    return _within(_WITH_KERNELS, False)


def packing_later(compile_packing: Compile) -> AbstractContextManager[None]:
    """Return a context: codecs opened in it give ``compile_packing`` the call that compiles."""
    return _within(_COMPILE_PACKING, compile_packing)


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def proven_or_pipeline(
    fused: FusedPacker, layout: KVLayout, run: KVRun, codecs: str
) -> StackPacker:
    """Return ``fused``, or its pipeline if the two restore ``run`` differently.

    Packing is compared, too: at once, or later in the call that ``packing_later`` describes.
    """
    payload = fused.pipeline.encode(run, 0, TRIED_AT, layout.dtype)
    kernels, num_tokens = f"the kernels of {codecs}", run[0][0].shape[1]
    if not is_proven(lambda: _restores_alike(fused, layout, payload, num_tokens), kernels):
        return fused.pipeline

    def prove_packing() -> None:
        if is_proven(
            lambda: fused.pack(run, 0, TRIED_AT, layout.dtype) == payload, f"{kernels} that pack"
        ):
            fused.packing_is_proven.set()

    _COMPILE_PACKING.get()(prove_packing)
    return fused


def _restores_alike(fused: FusedPacker, layout: KVLayout, payload: bytes, num_tokens: int) -> bool:
    """Return whether a packer restores the same rows as its pipeline."""
    outs = [layout.empty(num_tokens) for _ in range(2)]
    parts: tuple[StackPacker, ...] = (fused, fused.pipeline)
    for part, out in zip(parts, outs, strict=True):
        for array in (x for pair in out for x in pair):
            array.fill(0)
        part.decode([Reader(memoryview(payload))], out, 0, TRIED_AT, layout.dtype)
    flat = [[x.tobytes() for pair in out for x in pair] for out in outs]
    return flat[0] == flat[1]


def wave_run(layout: KVLayout, num_tokens: int = 70) -> KVRun:
    """Return a run whose rows have many different values, to compare packers with."""
    run = layout.empty(num_tokens)
    for number, array in enumerate(x for pair in run for x in pair):
        ramp = np.arange(array.size, dtype=np.float32).reshape(array.shape) + number
        values = np.sin(ramp * ramp)
        array[:] = values if layout.dtype == "float32" else floats.narrow(values, layout.dtype)
    return run


def padded(array: np.ndarray, *lengths: int) -> np.ndarray:
    """Return ``array`` padded with zeros along the axes after the first, up to ``lengths``."""
    missing = [(0, length - have) for length, have in zip(lengths, array.shape[1:], strict=False)]
    rest = [(0, 0)] * (array.ndim - 1 - len(missing))
    return np.pad(array, [(0, 0), *missing, *rest])


def side_by_side(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the tokens of several payloads, along the second axis; bytes four at a time."""
    if parts[0].dtype != np.uint8 or any(part.shape[1] % 4 for part in parts):
        return np.concatenate(parts, axis=1)
    words = [np.ascontiguousarray(part).view(np.uint32) for part in parts]
    width = words[0].shape[1]
    joined = np.empty((len(words[0]), len(words), width), np.uint32)
    for number, part in enumerate(words):
        joined[:, number] = part
    return joined.reshape(len(joined), len(words) * width).view(np.uint8)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy that begins at a line of the processor's cache."""
    raw = np.empty(array.nbytes + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    copy: np.ndarray = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@functools.lru_cache(maxsize=64)  # megabytes each if chunks and heads are large
def _angles(
    ropes: tuple[Rope, ...], half: int, first_token: int, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines, each fp32 (ropes + 1, tokens, half)."""
    shape = (len(ropes) + 1, num_tokens, max(half, VECTOR))
    cosines, sines = aligned(np.zeros(shape, np.float32)), aligned(np.zeros(shape, np.float32))
    for number, rope in enumerate(ropes):
        cos, sin = angle_tables(rope, first_token, num_tokens)
        cosines[number + 1, :, : cos.shape[1]] = cos
        sines[number + 1, :, : sin.shape[1]] = sin
    return cosines, sines
