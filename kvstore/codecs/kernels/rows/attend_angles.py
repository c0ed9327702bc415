"""Emits products of queries with blocks of polar coordinates, and weighted sums of blocks.

Bit planes hold a tree of angles for each block, and its radius (see ``attention.angles``). A vector
holds one column of as many tokens. A product goes from the finest angles up to the radius, a sum
from the radius down. The table holds the cosines of a level's angles, then their sines, level by
level. All numbers are fp32.
"""

from __future__ import annotations

from itertools import accumulate

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.attention.angles import BLOCK, LEVEL_BITS, RADIUS_BITS
from kvstore.codecs.kernels.emit.dtypes import widen_fp16
from kvstore.codecs.kernels.emit.emitter import F32, I32, I64, Emitter, Value, look_up
from kvstore.codecs.kernels.rows.attend_planes import TILE_VECTORS

LARGEST, INFINITE = 0x7BFF, 0x7C00  # the bits of fp16's largest number, and of infinity
VECTORS = range(TILE_VECTORS)
Vectors = list[Value]  # one for each of ``VECTORS``


class _Tree:
    """The planes of one tile of tokens."""

    def __init__(self, e: Emitter, planes: Value, step: Value, columns: Value, table: Value):
        self.e, self._step = e, step
        b = e.builder
        self.blocks = b.udiv(columns, ir.Constant(I64, BLOCK))
        sizes = [(BLOCK >> (level + 1)) * bits for level, bits in enumerate(LEVEL_BITS)]
        self._sizes = [*sizes, RADIUS_BITS]
        offsets = accumulate(self._sizes, initial=0)
        self._starts = [
            b.add(planes, b.mul(step, b.mul(self.blocks, ir.Constant(I64, offset))))
            for offset, _ in zip(offsets, self._sizes, strict=False)
        ]
        firsts = accumulate((2 << bits for bits in LEVEL_BITS), initial=0)
        self._words = [
            [
                [e.load(table, 4 * (first + (k << bits) + i), I32) for i in range(1 << bits)]
                for k in (0, 1)
            ]
            for first, bits in zip(firsts, LEVEL_BITS, strict=False)
        ]

    def _masks(self, level: int, block: Value, first: int, bits: int, v: int) -> list[Value]:
        b = self.e.builder
        start = b.mul(block, ir.Constant(I64, self._sizes[level]))
        for_bits = (b.add(start, ir.Constant(I64, first + k)) for k in range(bits))
        places = (b.add(self._starts[level], b.mul(self._step, x)) for x in for_bits)
        return [self.e.load_mask(place, v * self.e.lanes) for place in places]

    def turn(self, level: int, block: Value, number: int) -> tuple[Vectors, Vectors]:
        """Return the cosines and sines of one angle of a block."""
        bits, found = LEVEL_BITS[level], []
        for v in VECTORS:
            masks = self._masks(level, block, number * bits, bits, v)
            found.append([self.e.as_floats(look_up(self.e, masks, x)) for x in self._words[level]])
        cosines, sines = zip(*found, strict=True)
        return list(cosines), list(sines)

    def radii(self, block: Value) -> Vectors:
        """Return the radii of a block; damaged ones are finite, too."""
        e, found = self.e, []
        b = e.builder
        for v in VECTORS:
            word = e.all_words(0)
            for bit, mask in enumerate(self._masks(len(LEVEL_BITS), block, 0, RADIUS_BITS, v)):
                word = b.select(mask, b.or_(word, e.all_words(1 << bit)), word)
            size = b.and_(word, e.all_words(0x7FFF))
            sign = b.and_(word, e.all_words(0x8000))
            largest = b.or_(sign, e.all_words(LARGEST))
            word = b.select(b.icmp_unsigned("==", size, e.all_words(INFINITE)), largest, word)
            is_none = b.icmp_unsigned(">", size, e.all_words(INFINITE))
            found.append(widen_fp16(e, b.select(is_none, e.all_words(0), word)))
        return found


def emit_products(e: Emitter, num_bits: int, num_queries: int, args: tuple[Value, ...]) -> None:
    """Emit the products of a tile; ``args`` are as for planes of levels."""
    planes, step, _, columns, table, queries, query_step, out, out_step = args
    b, tree = e.builder, _Tree(e, planes, step, columns, table)
    numbers = range(num_queries)
    starts = [b.add(queries, b.mul(query_step, ir.Constant(I64, q))) for q in numbers]
    sums = [[e.variable(e.floats) for _ in VECTORS] for _ in numbers]
    for total in (total for row in sums for total in row):
        b.store(e.all_floats(0.0), total)

    def product(block: Value, level: int, number: int) -> list[Vectors]:
        """Return the products of a branch, a list for each query."""
        if level < 0:
            at = b.mul(block, ir.Constant(I64, 4 * BLOCK))
            values = [e.splat(e.load(b.add(x, at), 4 * number, F32)) for x in starts]
            return [[value] * TILE_VECTORS for value in values]
        first = product(block, level - 1, 2 * number)
        second = product(block, level - 1, 2 * number + 1)
        cosines, sines = tree.turn(level, block, number)
        return [
            [e.multiply_add(one[v], cosines[v], b.fmul(other[v], sines[v])) for v in VECTORS]
            for one, other in zip(first, second, strict=True)
        ]

    with cgutils.for_range(b, tree.blocks) as loop:
        found, radii = product(loop.index, len(LEVEL_BITS) - 1, 0), tree.radii(loop.index)
        for row, totals in zip(found, sums, strict=True):
            for v in VECTORS:
                b.store(e.multiply_add(row[v], radii[v], b.load(totals[v])), totals[v])
    for q, row in enumerate(sums):
        target = b.add(out, b.mul(out_step, ir.Constant(I64, q)))
        for v, total in enumerate(row):
            e.store(b.load(total), target, 4 * e.lanes * v)


def emit_sums(e: Emitter, num_bits: int, num_queries: int, args: tuple[Value, ...]) -> None:
    """Emit the addition of a tile of weighted tokens; ``args`` are as for planes of levels."""
    planes, step, _, columns, table, weights, weight_step, sums = args
    b, tree = e.builder, _Tree(e, planes, step, columns, table)
    numbers = range(num_queries)
    starts = [b.add(weights, b.mul(weight_step, ir.Constant(I64, q))) for q in numbers]
    factors = [[e.load(x, 4 * e.lanes * v, e.floats) for v in VECTORS] for x in starts]

    def add(block: Value, level: int, number: int, sizes: list[Vectors]) -> None:
        """Add a branch whose root has these sizes, a list for each query."""
        if level < 0:
            column = b.add(b.mul(block, ir.Constant(I64, BLOCK)), ir.Constant(I64, number))
            row = b.add(sums, b.mul(column, ir.Constant(I64, 4 * e.lanes * num_queries)))
            for q, of_query in enumerate(sizes):
                total = e.load(row, 4 * e.lanes * q, e.floats)
                for size in of_query:
                    total = b.fadd(total, size)
                e.store(total, row, 4 * e.lanes * q)
            return
        for k, turned in enumerate(tree.turn(level, block, number)):
            parts = [[b.fmul(x[v], turned[v]) for v in VECTORS] for x in sizes]
            add(block, level - 1, 2 * number + k, parts)

    with cgutils.for_range(b, tree.blocks) as loop:
        radii = tree.radii(loop.index)
        sizes = [[b.fmul(x[v], radii[v]) for v in VECTORS] for x in factors]
        add(loop.index, len(LEVEL_BITS) - 1, 0, sizes)
