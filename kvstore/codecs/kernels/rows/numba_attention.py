"""Attends to packed rows in numba functions; the counterpart of ``rows.attention``.

Rows stay packed: the query is rotated once, and the sums are rotated back once. All numbers are
fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvstore.codecs import floats
from kvstore.codecs.kernels.emit.emitter import (
    F32,
    I16,
    I32,
    I64,
    SIGN_BIT,
    Emitter,
    Value,
    f32,
    in_turn,
    log2,
    look_up,
)
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
TILE_TOKENS = 4  # number of rows whose weighted levels are added while a sum is in registers


def emit_scores(
    e: Emitter, shape: RowShape, num_queries: int, addresses: tuple[Value, ...]
) -> None:
    """Emit the products of one row with ``num_queries`` rotated queries.

    ``addresses``: of the packed row, its scale, the first query (fp32, contiguous) and the first
    product; then the bytes from one query's product to the next.
    """
    packed, scale, queries, out, step = addresses
    b = e.builder
    sums = [[e.all_floats(0.0)] * 2 for _ in range(num_queries)]
    for i in range(shape.dim // e.lanes):
        levels = _levels(e, shape, packed, i)
        for q, sum_of_query in enumerate(sums):
            query = e.load(queries, 4 * (q * shape.dim + i * e.lanes), e.floats)
            sum_of_query[i % 2] = e.multiply_add(levels, query, sum_of_query[i % 2])
    unit = _unit(e, shape, scale, 0)
    for q, (even, odd) in enumerate(sums):
        product = b.fmul(_sum_of_lanes(e, b.fadd(even, odd)), unit)
        e.store(product, b.add(out, b.mul(step, ir.Constant(I64, q))), 0)


def emit_sums(
    e: Emitter, shape: RowShape, num_queries: int, num_tokens: int, addresses: tuple[Value, ...]
) -> None:
    """Emit the addition of ``num_tokens`` weighted rows to ``num_queries`` rotated sums.

    ``addresses``: of the first packed row, its scale, its weight for the first query; the bytes
    from there to its weight for the next query; the address of the first sum (fp32, contiguous).
    """
    packed, scales, weights, step, sums = addresses
    b, row_nbytes = e.builder, shape.rows.packed_nbytes(shape.dim)
    factors = []
    for token in range(num_tokens):
        unit = _unit(e, shape, scales, token)
        starts = [b.add(weights, b.mul(step, ir.Constant(I64, q))) for q in range(num_queries)]
        products = [b.fmul(e.load(start, 4 * token, F32), unit) for start in starts]
        factors.append([e.splat(x) for x in products])
    for i in range(shape.dim // e.lanes):
        places = [4 * (q * shape.dim + i * e.lanes) for q in range(num_queries)]
        parts = [e.load(sums, place, e.floats) for place in places]
        for token, of_queries in enumerate(factors):
            row = b.add(packed, ir.Constant(I64, token * row_nbytes))
            levels = _levels(e, shape, row, i)
            parts = [
                e.multiply_add(levels, factor, part)
                for factor, part in zip(of_queries, parts, strict=True)
            ]
        for part, place in zip(parts, places, strict=True):
            e.store(part, sums, place)


def _levels(e: Emitter, shape: RowShape, packed: Value, i: int) -> Value:
    """Return vector ``i`` of a row's levels, whole numbers in fp32."""
    first = i * e.lanes
    masks = [e.load_mask(packed, k * shape.dim + first) for k in range(shape.num_bits)]
    levels = shape.rows.levels.astype(np.float32).view(np.uint32).tolist()
    magnitude = e.as_floats(look_up(e, I32, masks[:-1], levels))
    negative = e.flip(magnitude, e.all_words(SIGN_BIT))
    return e.builder.select(masks[-1], negative, magnitude)


def _unit(e: Emitter, shape: RowShape, scales: Value, token: int) -> Value:
    """Return the value of a level of one in a row; zero for a row that is not packed."""
    b = e.builder
    bits = b.zext(e.load(scales, 2 * token, I16), I32)
    size = b.shl(b.add(bits, ir.Constant(I32, floats.REBIAS)), ir.Constant(I32, 13))
    unit = b.fmul(b.bitcast(size, F32), f32(shape.rows.unit_of(shape.dim)))
    return b.select(b.icmp_unsigned("==", bits, ir.Constant(I32, 0)), f32(0.0), unit)


def _sum_of_lanes(e: Emitter, values: Value) -> Value:
    """Return the sum of a vector, by repeatedly adding its upper half to its lower half."""
    b, count = e.builder, values.type.count
    while count > 1:
        count //= 2
        kind = ir.VectorType(I32, count)
        masks = (in_turn(kind, *range(first, first + count)) for first in (0, count))
        low, high = (b.shuffle_vector(values, values, mask) for mask in masks)
        values = b.fadd(low, high)
    return b.extract_element(values, ir.Constant(I32, 0))


def _attend_intrinsic(emit: Callable[..., None]) -> Any:
    """Make an intrinsic (num_bits, dim, number of queries, sources: all literal; addresses)."""

    def typed(context: Any, bits: Any, dim: Any, queries: Any, sources: Any, at: Any) -> Any:
        shape = RowShape(bits.literal_value, dim.literal_value, "float32")

        def emit_here(builder: Any, addresses: Any) -> None:
            emit(Emitter(builder, shape.lanes), shape, queries.literal_value, addresses)

        return emitted(emit_here, bits, dim, queries, sources, at)

    return intrinsic(prefer_literal=True)(typed)


def _sums_of_tile(e: Emitter, shape: RowShape, queries: int, at: tuple[Any, ...]) -> None:
    emit_sums(e, shape, queries, TILE_TOKENS, at)


def _sums_of_one(e: Emitter, shape: RowShape, queries: int, at: tuple[Any, ...]) -> None:
    emit_sums(e, shape, queries, 1, at)


_scores_of_row = _attend_intrinsic(emit_scores)
_add_tile = _attend_intrinsic(_sums_of_tile)
_add_one = _attend_intrinsic(_sums_of_one)


@njit
def rotate(rows, turn, back):
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
def _flip(x, signs):
    for i in range(len(x)):
        x[i] *= signs[i]


_butterflies: Any = njit(add_and_subtract)


@njit
def _multiply_base(x, base, power):
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
def rows_of_head(codes, scales, head):
    """Return the addresses of a head's first packed row and of its scale, and the rows' number."""
    row = address_of(codes) + head * codes.strides[0]
    return row, address_of(scales) + head * scales.strides[0], scales.shape[1]


@njit
def multiply_rows(bits, dim, queries, sources, rows, query, out):
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
def add_rows(bits, dim, queries, sources, rows, weights, sums):
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

    def scores(codes, scales, query, out, turn):
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

    def sums(codes, scales, weights, out, turn):
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
    """Implements ``kvstore.codecs.rows.attention.RowAttention`` with compiled functions."""

    rows: RotatedRows
    dim: int

    def scores(self, query, codes, scales, out):
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
