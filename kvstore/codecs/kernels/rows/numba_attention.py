"""Attends to packed rows in numba functions; the counterpart of ``codecs.attention.rotated``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from kvstore.codecs.kernels.emit.emitter import Emitter
from kvstore.codecs.kernels.rows import attend_rows
from kvstore.codecs.kernels.rows.row_shape import RowShape, has_kernel
from kvstore.codecs.kernels.sources import SOURCES
from kvstore.codecs.loops.numba_functions import array_of, compiled, tuple_items
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.rotation import base_matrix, order_of, sign_masks

LARGEST = 127  # byte of a query
LEAST_TOKENS = 256  # of a head; for fewer, rounding the query costs more than it saves
MOST_QUERIES = 4  # in one pass over the rows: their sums have to fit into registers


def _attend_intrinsic(emit: Callable[..., None]) -> Any:
    """Make an intrinsic (num_bits, dim, number of queries, sources: all literal; addresses)."""

    def typed(context: Any, bits: Any, dim: Any, queries: Any, sources: Any, at: Any) -> Any:
        shape = RowShape(bits.literal_value, dim.literal_value, "float32")

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(builder, shape.lanes)
            emit(e, shape, queries.literal_value, tuple_items(builder, at, args[4]))
            return context.get_dummy_value()

        return types.void(bits, dim, queries, sources, at), generate

    return intrinsic(prefer_literal=True)(typed)


def _sums_of_tile(e: Emitter, shape: RowShape, queries: int, at: tuple[Any, ...]) -> None:
    attend_rows.emit_sums(e, shape, queries, attend_rows.TILE_TOKENS, at)


def _sums_of_one(e: Emitter, shape: RowShape, queries: int, at: tuple[Any, ...]) -> None:
    attend_rows.emit_sums(e, shape, queries, 1, at)


scores_of_row = _attend_intrinsic(attend_rows.emit_scores)
_byte_scores_of_row = _attend_intrinsic(attend_rows.emit_byte_scores)
add_tile = _attend_intrinsic(_sums_of_tile)
add_one = _attend_intrinsic(_sums_of_one)


@njit
def rotate(x: Any, signs: Any, base: Any, power: int, back: bool) -> None:
    """Multiply fp32 (dim,) in place by signs, then H; if ``back``, by the transpose of that."""
    count = len(base)
    if not back:
        for i in range(len(x)):
            x[i] *= signs[i]
    else:
        _multiply_base(x, base.T, count, power)
    distance = 1
    while distance < power:
        for start in range(0, len(x), 2 * distance):
            for i in range(start, start + distance):
                low, high = x[i], x[i + distance]
                x[i], x[i + distance] = low + high, low - high
        distance *= 2
    if not back:
        _multiply_base(x, base, count, power)
    else:
        for i in range(len(x)):
            x[i] *= signs[i]


@njit
def _multiply_base(x: Any, base: Any, count: int, power: int) -> None:
    if count == 1:
        return
    old = x.copy()
    for row in range(count):
        for i in range(power):
            total = np.float32(0)
            for k in range(count):
                total += base[row, k] * old[k * power + i]
            x[row * power + i] = total


def _scores_function(bits: int, dim: int, num_queries: int) -> Any:
    sources, row_nbytes = SOURCES, bits * dim // 8

    def scores(
        codes: Any, scales: Any, query: Any, out: Any, signs: Any, base: Any, power: int
    ) -> None:
        heads, tokens = scales.shape
        rotated = np.empty((num_queries, dim), np.float32)
        for head in range(heads):
            rotated[:] = query[head]
            for q in range(num_queries):
                rotate(rotated[q], signs, base, power, False)
            row = codes.ctypes.data + head * codes.strides[0]
            scale = scales.ctypes.data + head * scales.strides[0]
            target = out.ctypes.data + head * out.strides[0]
            for _ in range(tokens):
                at = (row, scale, rotated.ctypes.data, target, out.strides[1])
                scores_of_row(bits, dim, num_queries, sources, at)
                row += row_nbytes
                scale += 2
                target += 4
        rotated[0, 0] = 0  # numba frees an array after its last use; its address does not count

    return compiled(types.void, scores, *_argument_types())


@njit
def _to_bytes(x: Any, whole: Any) -> Any:
    """Round fp32 (dim,) to ``LARGEST`` steps of its largest value; return a step."""
    largest = np.float32(0)
    for value in x:
        largest = max(largest, abs(value))
    factor = np.float32(LARGEST) / largest if largest > 0 else np.float32(0)
    for i in range(len(x)):
        whole[i] = np.int8(np.rint(x[i] * factor))
    return largest / np.float32(LARGEST)


def _byte_scores_function(bits: int, dim: int, num_queries: int) -> Any:
    sources, row_nbytes = SOURCES, bits * dim // 8

    def scores(
        codes: Any, scales: Any, query: Any, out: Any, signs: Any, base: Any, power: int
    ) -> None:
        heads, tokens = scales.shape
        rotated = np.empty((num_queries, dim), np.float32)
        whole = np.empty((num_queries, dim), np.int8)
        ones = np.empty(num_queries, np.float32)
        for head in range(heads):
            rotated[:] = query[head]
            for q in range(num_queries):
                rotate(rotated[q], signs, base, power, False)
                ones[q] = _to_bytes(rotated[q], whole[q])
            row = codes.ctypes.data + head * codes.strides[0]
            scale = scales.ctypes.data + head * scales.strides[0]
            target = out.ctypes.data + head * out.strides[0]
            given = (whole.ctypes.data, ones.ctypes.data)
            for _ in range(tokens):
                at = (row, scale, given[0], given[1], target, out.strides[1])
                _byte_scores_of_row(bits, dim, num_queries, sources, at)
                row += row_nbytes
                scale += 2
                target += 4
        whole[0, 0] = 0  # as in ``scores``
        ones[0] = 0

    return compiled(types.void, scores, *_argument_types())


def _sums_function(bits: int, dim: int, num_queries: int) -> Any:
    sources, row_nbytes, tile = SOURCES, bits * dim // 8, attend_rows.TILE_TOKENS

    def sums(
        codes: Any, scales: Any, weights: Any, out: Any, signs: Any, base: Any, power: int
    ) -> None:
        heads, tokens = scales.shape
        total = np.empty((num_queries, dim), np.float32)
        for head in range(heads):
            total[:] = 0
            row = codes.ctypes.data + head * codes.strides[0]
            scale = scales.ctypes.data + head * scales.strides[0]
            weight = weights.ctypes.data + head * weights.strides[0]
            step = weights.strides[1]
            whole = tokens - tokens % tile
            for _ in range(0, whole, tile):
                at = (row, scale, weight, step, total.ctypes.data)
                add_tile(bits, dim, num_queries, sources, at)
                row += tile * row_nbytes
                scale += tile * 2
                weight += tile * 4
            for _ in range(whole, tokens):
                at = (row, scale, weight, step, total.ctypes.data)
                add_one(bits, dim, num_queries, sources, at)
                row += row_nbytes
                scale += 2
                weight += 4
            for q in range(num_queries):
                rotate(total[q], signs, base, power, True)
            out[head] += total
        total[0, 0] = 0  # as in ``scores``

    return compiled(types.void, sums, *_argument_types())


def _argument_types() -> tuple[Any, ...]:
    codes = types.Array(types.uint8, 3, "A", readonly=True)
    scales = types.Array(types.uint16, 2, "A", readonly=True)
    given = types.Array(types.float32, 3, "A", readonly=True)
    out = types.Array(types.float32, 3, "A")
    base = types.Array(types.float32, 2, "C", readonly=True)
    return codes, scales, given, out, array_of(types.float32, 1), base, types.int64


@functools.cache
def _kernels(bits: int, dim: int, num_queries: int) -> tuple[Any, Any]:
    shape = (bits, dim, num_queries)
    return _scores_function(*shape), _sums_function(*shape)


@functools.cache
def _byte_kernel(bits: int, dim: int, num_queries: int) -> Any:
    return _byte_scores_function(bits, dim, num_queries)


@dataclass(frozen=True)
class NumbaAttention:
    """Implements ``kvstore.codecs.attention.rotated.RowAttention`` with compiled functions."""

    rows: RotatedRows
    dim: int

    def scores(
        self, query: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        for part in blocks_of(query.shape[1]):
            kernel, _ = _kernels(self.rows.num_bits, self.dim, part.stop - part.start)
            kernel(codes, scales, query[:, part], out[:, part], *self._rotation)

    def near_scores(
        self, query: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        shape = RowShape(self.rows.num_bits, self.dim, "float32")
        if scales.shape[1] < LEAST_TOKENS or not attend_rows.has_byte_scores(shape):
            return self.scores(query, codes, scales, out)
        for part in blocks_of(query.shape[1]):
            kernel = _byte_kernel(self.rows.num_bits, self.dim, part.stop - part.start)
            kernel(codes, scales, query[:, part], out[:, part], *self._rotation)

    def add_weighted(
        self, weights: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        for part in blocks_of(weights.shape[1]):
            _, kernel = _kernels(self.rows.num_bits, self.dim, part.stop - part.start)
            kernel(codes, scales, weights[:, part], out[:, part], *self._rotation)

    @functools.cached_property
    def _rotation(self) -> tuple[np.ndarray, np.ndarray, int]:
        return rotation_of(self.dim)


def rotation_of(dim: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the arguments of ``rotate``: fp32 signs (dim,), the base matrix, the power of two."""
    order = order_of(dim)
    assert order is not None
    signs = 1 - 2 * (sign_masks(dim) >> 31).astype(np.float32)
    return signs, base_matrix(order.base), order.power


def blocks_of(num_queries: int) -> list[slice]:
    starts = range(0, num_queries, MOST_QUERIES)
    return [slice(i, min(i + MOST_QUERIES, num_queries)) for i in starts]


def attention_of(rows: RotatedRows, dim: int) -> NumbaAttention | None:
    """Return the compiled functions for rows of this length, or None if there are none."""
    return NumbaAttention(rows, dim) if has_kernel(dim) else None
