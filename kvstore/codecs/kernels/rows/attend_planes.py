"""Emits products of queries with planes of columns, and weighted sums of columns.

A plane has one bit of one column for all tokens (see ``stages.planes``). So a vector holds one
column of as many tokens, and no lane is added to another before the end. The bits of a column
choose one number of a table. All numbers are fp32.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit.emitter import F32, I32, I64, Emitter, Value, look_up

TILE_VECTORS = 4  # of tokens, whose products stay in registers


def emit_products(e: Emitter, num_bits: int, num_queries: int, args: tuple[Value, ...]) -> None:
    """Emit the products of a tile of tokens with ``num_queries`` queries.

    ``args``: address of the tile in the first plane; bytes to the next plane of a column and to
    the next column; number of columns; address of the table; address of the first query and bytes
    to the next; address of the first product and bytes to the next query's.
    """
    planes, plane_step, column_step, columns, table, queries, query_step, out, out_step = args
    b, words = e.builder, _table(e, num_bits, table)
    starts = [b.add(queries, b.mul(query_step, ir.Constant(I64, q))) for q in range(num_queries)]
    sums = [[e.variable(e.floats) for _ in range(TILE_VECTORS)] for _ in starts]
    for total in (total for row in sums for total in row):
        b.store(e.all_floats(0.0), total)
    with cgutils.for_range(b, columns) as loop:
        column = b.add(planes, b.mul(loop.index, column_step))
        at = b.mul(loop.index, ir.Constant(I64, 4))
        values = [e.splat(e.load(b.add(start, at), 0, F32)) for start in starts]
        for v in range(TILE_VECTORS):
            numbers = _numbers(e, num_bits, words, column, plane_step, v)
            for value, row in zip(values, sums, strict=True):
                b.store(e.multiply_add(value, numbers, b.load(row[v])), row[v])
    for q, row in enumerate(sums):
        target = b.add(out, b.mul(out_step, ir.Constant(I64, q)))
        for v, total in enumerate(row):
            e.store(b.load(total), target, 4 * e.lanes * v)


def emit_sums(e: Emitter, num_bits: int, num_queries: int, args: tuple[Value, ...]) -> None:
    """Emit the addition of a tile of weighted tokens to sums, a vector for each column and query.

    ``args``: the first five are those of ``emit_products``; then the address of the tile's first
    weight and bytes to the next query's; address of the first sum, of the first column for all
    queries, then of the next column.
    """
    planes, plane_step, column_step, columns, table, weights, weight_step, sums = args
    b, words = e.builder, _table(e, num_bits, table)
    starts = [b.add(weights, b.mul(weight_step, ir.Constant(I64, q))) for q in range(num_queries)]
    factors = [[e.load(x, 4 * e.lanes * v, e.floats) for v in range(TILE_VECTORS)] for x in starts]
    with cgutils.for_range(b, columns) as loop:
        column = b.add(planes, b.mul(loop.index, column_step))
        row = b.add(sums, b.mul(loop.index, ir.Constant(I64, 4 * e.lanes * num_queries)))
        totals = [e.load(row, 4 * e.lanes * q, e.floats) for q in range(num_queries)]
        for v in range(TILE_VECTORS):
            numbers = _numbers(e, num_bits, words, column, plane_step, v)
            totals = [
                e.multiply_add(numbers, of_query[v], total)
                for of_query, total in zip(factors, totals, strict=True)
            ]
        for q, total in enumerate(totals):
            e.store(total, row, 4 * e.lanes * q)


def _table(e: Emitter, num_bits: int, table: Value) -> list[Value]:
    return [e.load(table, 4 * k, I32) for k in range(1 << num_bits)]


def _numbers(
    e: Emitter, num_bits: int, words: list[Value], column: Value, step: Value, v: int
) -> Value:
    """Return the numbers of vector ``v`` of a tile's tokens in one column."""
    starts = [
        e.builder.add(column, e.builder.mul(step, ir.Constant(I64, k))) for k in range(num_bits)
    ]
    masks = [e.load_mask(start, v * e.lanes) for start in starts]
    return e.as_floats(look_up(e, masks, words))
