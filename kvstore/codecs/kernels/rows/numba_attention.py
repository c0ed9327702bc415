"""Attends to packed rows in numba functions; the counterpart of ``codecs.attention.rotated``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from kvstore.codecs.kernels.emit.emitter import Emitter, log2
from kvstore.codecs.kernels.rows import attend_rows
from kvstore.codecs.kernels.rows.attend_rows import TILE_TOKENS
from kvstore.codecs.kernels.rows.row_shape import RowShape, has_kernel
from kvstore.codecs.loops.compiled_loops import add_and_subtract
from kvstore.codecs.loops.numba_functions import (
    address_of,
    compiled,
    copy,
    emitted,
    sources_of,
    tuple_of,
)
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.rotation import base_matrix, order_of, sign_masks

SOURCES = sources_of(__file__)

MOST_QUERIES = 4  # in one pass over the rows: their sums have to fit into registers


def _attend_intrinsic(emit: Callable[..., None]) -> Any:
    """Make an intrinsic (num_bits, dim, number of queries, sources: all literal; addresses)."""

    def typed(context: Any, bits: Any, dim: Any, queries: Any, sources: Any, at: Any) -> Any:
        shape = RowShape(bits.literal_value, dim.literal_value, "float32")

        def emit_here(builder: Any, addresses: Any) -> None:
            emit(Emitter(builder, shape.lanes), shape, queries.literal_value, addresses)

        return emitted(emit_here, bits, dim, queries, sources, at)

    return intrinsic(prefer_literal=True)(typed)


def _sums_of_tile(e: Emitter, shape: RowShape, queries: int, at: tuple[Any, ...]) -> None:
    attend_rows.emit_sums(e, shape, queries, TILE_TOKENS, at)


def _sums_of_one(e: Emitter, shape: RowShape, queries: int, at: tuple[Any, ...]) -> None:
    attend_rows.emit_sums(e, shape, queries, 1, at)


_scores_of_row = _attend_intrinsic(attend_rows.emit_scores)
_add_tile = _attend_intrinsic(_sums_of_tile)
_add_one = _attend_intrinsic(_sums_of_one)


@njit
def rotate(rows: Any, turn: Any, back: bool) -> None:
    """Multiply fp32 (rows, dim) in place by signs, then H; if ``back``, by the transpose of that.

    ``turn``: from ``rotation_of``.
    """
    signs, base, distances = turn
    power = rows.shape[1] // len(base)
    for row in range(len(rows)):
        if back:
            _multiply_base(rows[row], base.T, power)
        else:
            _flip(rows[row], signs)
    _butterflies(rows, distances)
    for row in range(len(rows)):
        if back:
            _flip(rows[row], signs)
        else:
            _multiply_base(rows[row], base, power)


@njit
def _flip(x: Any, signs: Any) -> None:
    for i in range(len(x)):
        x[i] *= signs[i]


_butterflies: Any = njit(add_and_subtract)


@njit
def _multiply_base(x: Any, base: Any, power: int) -> None:
    count = len(base)
    if count == 1:
        return
    old = x.copy()
    for row in range(count):
        for i in range(power):
            total = np.float32(0)
            for k in range(count):
                total += base[row, k] * old[k * power + i]
            x[row * power + i] = total


@njit
def rows_of_head(codes: Any, scales: Any, head: int) -> Any:
    """Return the addresses of a head's first packed row and of its scale, and the rows' number."""
    row = address_of(codes) + head * codes.strides[0]
    return row, address_of(scales) + head * scales.strides[0], scales.shape[1]


@njit
def multiply_rows(
    bits: int, dim: int, queries: int, sources: int, rows: Any, query: int, out: Any
) -> None:
    """Write the products of a head's rows with rotated queries.

    The first four are literals. ``rows``: from ``rows_of_head``. ``query``: the address of the
    first query. ``out``: the address of its first product, and the bytes to the next query's.
    """
    row, scale, count = rows
    target, step = out
    for _ in range(count):
        _scores_of_row(bits, dim, queries, sources, (row, scale, query, target, step))
        row += bits * dim // 8
        scale += 2
        target += 4


@njit
def add_rows(
    bits: int, dim: int, queries: int, sources: int, rows: Any, weights: Any, sums: int
) -> None:
    """Add a head's weighted rows to the rotated sums at address ``sums``.

    The first five are as for ``multiply_rows``. ``weights``: the address of the first weight of the
    first query, and the bytes to the next query's.
    """
    row, scale, count = rows
    weight, step = weights
    whole = count - count % TILE_TOKENS
    for _ in range(0, whole, TILE_TOKENS):
        _add_tile(bits, dim, queries, sources, (row, scale, weight, step, sums))
        row += TILE_TOKENS * (bits * dim // 8)
        scale += TILE_TOKENS * 2
        weight += TILE_TOKENS * 4
    for _ in range(whole, count):
        _add_one(bits, dim, queries, sources, (row, scale, weight, step, sums))
        row += bits * dim // 8
        scale += 2
        weight += 4


def _scores_function(bits: int, dim: int, num_queries: int) -> Any:
    sources = SOURCES

    def scores(codes: Any, scales: Any, query: Any, out: Any, turn: Any) -> None:
        rotated = np.empty((num_queries, dim), np.float32)
        for head in range(len(scales)):
            copy(query[head], rotated)
            rotate(rotated, turn, False)
            rows = rows_of_head(codes, scales, head)
            target = (address_of(out) + head * out.strides[0], out.strides[1])
            multiply_rows(bits, dim, num_queries, sources, rows, address_of(rotated), target)
        rotated[0, 0] = 0  # numba frees an array after its last use; its address does not count

    return compiled("void", scores, *_argument_types())


def _sums_function(bits: int, dim: int, num_queries: int) -> Any:
    sources = SOURCES

    def sums(codes: Any, scales: Any, weights: Any, out: Any, turn: Any) -> None:
        total = np.empty((num_queries, dim), np.float32)
        for head in range(len(scales)):
            total[:] = 0
            rows = rows_of_head(codes, scales, head)
            given = (address_of(weights) + head * weights.strides[0], weights.strides[1])
            add_rows(bits, dim, num_queries, sources, rows, given, address_of(total))
            rotate(total, turn, True)
            for q in range(num_queries):
                for i in range(dim):
                    out[head, q, i] += total[q, i]
        total[0, 0] = 0  # as in ``scores``

    return compiled("void", sums, *_argument_types())


def _argument_types() -> tuple[Any, ...]:
    codes = types.Array(types.uint8, 3, "A", readonly=True)
    scales = types.Array(types.uint16, 2, "A", readonly=True)
    given = types.Array(types.float32, 3, "A", readonly=True)
    return codes, scales, given, types.Array(types.float32, 3, "A"), turn_type()


def turn_type() -> Any:
    """Return the numba type of ``rotation_of``'s result."""
    return tuple_of("f4:1 f4:2r i8:1")


@functools.cache
def _kernels(bits: int, dim: int, num_queries: int) -> tuple[Any, Any]:
    shape = (bits, dim, num_queries)
    return _scores_function(*shape), _sums_function(*shape)


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
            kernel(codes, scales, query[:, part], out[:, part], self._rotation)

    def add_weighted(
        self, weights: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        for part in blocks_of(weights.shape[1]):
            _, kernel = _kernels(self.rows.num_bits, self.dim, part.stop - part.start)
            kernel(codes, scales, weights[:, part], out[:, part], self._rotation)

    @functools.cached_property
    def _rotation(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return rotation_of(self.dim)


def rotation_of(dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of ``rotate``: fp32 signs (dim,), the base matrix, int64 distances."""
    order = order_of(dim)
    assert order is not None
    signs = 1 - 2 * (sign_masks(dim) >> 31).astype(np.float32)
    return signs, base_matrix(order.base), 1 << np.arange(log2(order.power))


def blocks_of(num_queries: int) -> list[slice]:
    starts = range(0, num_queries, MOST_QUERIES)
    return [slice(i, min(i + MOST_QUERIES, num_queries)) for i in starts]


def attention_of(rows: RotatedRows, dim: int) -> NumbaAttention | None:
    """Return the compiled functions for rows of this length, or None if there are none."""
    return NumbaAttention(rows, dim) if has_kernel(dim) else None
