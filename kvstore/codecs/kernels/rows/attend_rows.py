"""Emits products of a query with packed rows, and weighted sums of packed rows.

Rows stay packed: the query is rotated once, and the sums are rotated back once (see
``kvstore.codecs.attention.rotated``). All numbers are fp32.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

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
    look_up,
)
from kvstore.codecs.kernels.rows.row_shape import RowShape

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
