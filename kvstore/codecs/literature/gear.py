"""GEAR: KIVI's groups, a low-rank part of their error, and outliers stored apart.

Idea: a few values stretch a group's steps, so they are taken out; the error of the others is
coherent over tokens, so a matrix of low rank holds much of it.
Formula: X = Q(X') + A B + S. X' has the values farthest from the mean of their channel (keys) or
token (values) replaced by the mean of the others, A B is the best approximation of rank ``rank`` of
X' - Q(X') for the chunk of a head, and S is the remaining error of the values taken out.
Size: KIVI's b + 32 / group bits, 16 rank (T + D) / (T D) and 32 bits for each outlier: 4.75 bits
for chunks of 128 tokens and heads of 128. The paper's chunks are longer, so its matrices take less.
Paper: GEAR, arXiv 2403.05527.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.floats import limited_to_fp16
from kvstore.codecs.literature.groups import GROUP, Axis, MinMaxGroups, Rounded
from kvstore.codecs.literature.stages.head_pipelines import HalfRange, HeadPipelines, planes_of
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.errors import Corrupt

FEW = 8  # outliers of a row or a channel: to look for each is faster than to sort


def gear(bits: int = 2, rank: int = 4, outliers: float = 2.0, group: int = GROUP) -> Codec:
    """Make the preset ``gear``; ``outliers``: percent of all values."""
    keys, values = (
        functools.partial(
            _corrected, bits=bits, rank=rank, outliers=outliers, group=group, along=along
        )
        for along in ("tokens", "width")
    )
    return StackCodec("gear.1", HeadPipelines(keys, values), least_bits=(bits, bits))


class _Note(NamedTuple):
    """The note of a chunk, after reading."""

    groups: object
    left: np.ndarray  # A, fp32 (units, tokens, rank)
    right: np.ndarray  # B, fp32 (units, rank, width)
    sparse: np.ndarray  # S, fp32 (units, tokens, width)


class CorrectedGroups:
    """Scales groups like ``MinMaxGroups``, and adds A B and S. Implements ``Transform``."""

    def __init__(
        self, shape: StackShape, groups: MinMaxGroups, bits: int, rank: int, share: float, axis: int
    ) -> None:
        """``share`` of the values along ``axis`` (1: tokens, 2: width) are outliers."""
        self._shape, self._groups = shape, groups
        self._rounded = Rounded(bits)
        self._rank, self._share, self._axis = rank, share, axis

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        places = self._places(stack)
        filled = self._filled(stack, places)
        scaled, note = self._groups.forward(filled, first_token)
        codes = self._rounded.quantise(scaled)
        known = self._groups.read(Reader(memoryview(note)), stack.shape[1])
        rough = self._groups.backward(self._rounded.restore(codes), first_token, known)
        missed = filled - rough
        np.put_along_axis(missed, places, 0, self._axis)
        left, right = _low_rank(missed, self._rank_of(stack.shape[1]))
        again = rough + np.matmul(left.astype(np.float32), right.astype(np.float32))
        apart = limited_to_fp16(np.take_along_axis(stack - again, places, self._axis))
        parts = (left, right, places.astype("<u2"), apart)
        return scaled, note + b"".join(x.tobytes() for x in parts)

    def read(self, reader: Reader, num_tokens: int) -> object:
        units, width, rank = self._shape.num_units, self._shape.width, self._rank_of(num_tokens)
        groups = self._groups.read(reader, num_tokens)
        left = reader.take("<f2", units, num_tokens, rank).astype(np.float32)
        right = reader.take("<f2", units, rank, width).astype(np.float32)
        shape = self._places_shape(num_tokens)
        places = reader.take("<u2", *shape).astype(np.int64)
        apart = reader.take("<f2", *shape).astype(np.float32)
        length = (num_tokens, width)[self._axis - 1]
        if not all(np.isfinite(x).all() for x in (left, right, apart)) or (places >= length).any():
            raise Corrupt("a matrix or an outlier is none that was written")
        sparse = np.zeros((units, num_tokens, width), np.float32)
        np.put_along_axis(sparse, places, apart, self._axis)
        return _Note(groups, left, right, sparse)

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        assert isinstance(note, _Note)
        rough = self._groups.backward(stack, first_token, note.groups)
        return rough + np.matmul(note.left, note.right) + note.sparse

    def note_nbytes(self, num_tokens: int) -> int:
        matrices = self._shape.num_units * (num_tokens + self._shape.width)
        sparse = 4 * int(np.prod(self._places_shape(num_tokens)))
        rank = self._rank_of(num_tokens)
        return self._groups.note_nbytes(num_tokens) + 2 * rank * matrices + sparse

    def _rank_of(self, num_tokens: int) -> int:
        return min(self._rank, num_tokens, self._shape.width)

    def _places_shape(self, num_tokens: int) -> tuple[int, int, int]:
        sizes = [self._shape.num_units, num_tokens, self._shape.width]
        sizes[self._axis] = round(self._share * sizes[self._axis])
        return sizes[0], sizes[1], sizes[2]

    def _places(self, stack: np.ndarray) -> np.ndarray:
        """Return the positions of outliers along the axis, int64, ascending."""
        away = np.abs(stack - stack.mean(axis=self._axis, keepdims=True))
        count = self._places_shape(stack.shape[1])[self._axis]
        if count > FEW:
            order = np.argsort(-away, axis=self._axis, kind="stable")
            return np.sort(np.take(order, np.arange(count), self._axis), self._axis)
        places = np.empty(self._places_shape(stack.shape[1]), np.int64)
        each = np.split(places, count, self._axis) if count else []
        for place in each:
            place[:] = np.argmax(away, axis=self._axis, keepdims=True)
            np.put_along_axis(away, place, -1, self._axis)
        places.sort(axis=self._axis)
        return places

    def _filled(self, stack: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the stack with outliers replaced by the mean of all others along the axis."""
        count, length = places.shape[self._axis], stack.shape[self._axis]
        filled = stack.copy()
        np.put_along_axis(filled, places, 0, self._axis)
        means = filled.sum(axis=self._axis, keepdims=True) / max(length - count, 1)
        np.put_along_axis(filled, places, np.broadcast_to(means, places.shape), self._axis)
        return filled


def _low_rank(matrices: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return fp16 factors of the best approximations of that rank."""
    left, sizes, right = np.linalg.svd(matrices, full_matrices=False)
    roots = np.sqrt(sizes[:, :rank])
    return limited_to_fp16(left[:, :, :rank] * roots[:, None]), limited_to_fp16(
        right[:, :rank] * roots[:, :, None]
    )


def _corrected(
    shape: StackShape, bits: int, rank: int, outliers: float, group: int, along: Axis
) -> Pipeline:
    groups = MinMaxGroups(shape, bits, group, along)
    axis = 1 if along == "tokens" else 2
    corrected = CorrectedGroups(shape, groups, bits, rank, outliers / 100, axis)
    coder = planes_of(shape, bits)
    return Pipeline(shape, (), HalfRange(shape), (corrected,), Rounded(bits), coder)
