"""Emits the packing of rows; the counterpart of ``rows.rotated_rows``.

Packing takes five steps over a block of rows. The first computes a few partial sums of squares of
each row; the second computes norms from them, a vector of rows at a time, so that no row waits for
a sum over lanes, a root and a division one after the other. The third writes planes; the fourth
counts levels in them, with integer units that the other steps leave idle; the fifth makes scales.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from kvstore.codecs import floats
from kvstore.codecs.kernels.emit.dtypes import load_row, load_squares
from kvstore.codecs.kernels.emit.emitter import (
    F32,
    I8,
    I16,
    I32,
    Emitter,
    Value,
    host_features,
    in_turn,
    log2,
)
from kvstore.codecs.kernels.rows import rotation
from kvstore.codecs.kernels.rows.row_shape import RowShape
from kvstore.codecs.rows.rotated_rows import SPARE_BITS, RotatedRows, size_of, squared_levels
from kvstore.codecs.rows.rotation import sign_masks

NEAREST = 1.5 * 2.0**23  # adding it to a float leaves the nearest whole number in the lower bits
# Layouts of 64 elements. Most steps are from (V; a b c d e) to (c; a b d e V): interleaving within
# 128 bits, which is the fastest shuffle. After the last, two vectors of words can be packed to a
# vector of bytes in natural order.
TO_BYTES = [
    *((5, 4, 2, 1, 0, 3), (4, 5, 2, 1, 0, 3), (2, 5, 4, 1, 0, 3)),
    *((1, 5, 4, 0, 3, 2), (0, 5, 4, 3, 2, 1), (3, 5, 4, 2, 1, 0)),
]


def emit_squares(e: Emitter, shape: RowShape, row: Value, sums: Value) -> None:
    """Emit step 1: ``e.lanes`` fp32 sums of squares of a row to ``sums``."""
    neighbours = load_squares(e, shape.dtype, row, shape.dim)
    e.store(rotation.partial_norm(e, shape.order, neighbours), sums, 0)


def emit_norms(e: Emitter, shape: RowShape, sums: Value, norms: Value, factors: Value) -> None:
    """Emit step 2: fp32 norms of ``e.lanes`` rows, and factors that scale rows to one size."""
    rows = [e.load(sums, 4 * e.lanes * k, e.floats) for k in range(e.lanes)]
    norm = e.sqrt(rotation.sums_of_lanes(e, rows))
    e.store(norm, norms, 0)
    factor = e.as_words(e.builder.fdiv(e.all_floats(size_of(shape.dim)), norm))
    e.store(e.builder.and_(factor, e.all_words(-1 << SPARE_BITS)), factors, 0)


def emit_pack(
    e: Emitter, shape: RowShape, row: Value, factor: Value, packed: Value, ahead: Value
) -> None:
    """Emit step 3: the planes of a row to ``packed``.

    ``factor``: address of the row's factor; ``ahead``: address of a row to prefetch, of the next
    block.
    """
    e.prefetch(ahead, shape.row_nbytes)
    wide = Emitter(e.builder, shape.wide_lanes)
    once = e.load(factor, 0, F32)
    times = [e.splat(by) for by in (once, e.builder.fadd(once, once))]
    x = load_row(e, shape.dtype, row, sign_masks(shape.dim))
    # Twice as large, a number has the same lower bits. With equal factors LLVM would join short
    # vectors to long ones, which fewer units compute.
    whole = [
        e.multiply_add(v, times[k % 2], e.all_floats(NEAREST * (1 + k % 2)))
        for k, v in enumerate(x)
    ]
    if shape.is_mixed:
        z = rotation.mixed(wide, shape.order, _in_order(e, whole))
        masks = [_masks_of_halves(wide, shape, v) for v in z]
    elif _fits_bytes(wide, shape):
        z = rotation.rotate(wide, shape.order, _stretches(wide, whole, TO_BYTES[0]), TO_BYTES)
        masks = [_masks_of_bytes(wide, shape, a, b) for a, b in zip(z[::2], z[1::2], strict=True)]
    else:
        layouts = rotation.exchanged(rotation.split(wide.lanes), range(log2(wide.lanes)))
        z = rotation.rotate(wide, shape.order, _halves(wide, whole), layouts)
        masks = [_masks_of_halves(wide, shape, v) for v in z]
    for number, plane in enumerate(zip(*masks, strict=True)):
        at = number * shape.dim // 8
        for bits in e.whole_bytes(plane):
            e.store(bits, packed, at)
            at += bits.type.width // 8


def _in_order(e: Emitter, row: list[Value]) -> list[Value]:
    """Return the lower 16 bits of split vectors in natural order."""
    b, kind, words = e.builder, ir.VectorType(I16, 2 * e.lanes), [e.as_words(x) for x in row]
    low = [b.and_(x, e.all_words(0xFFFF)) for x in words[::2]]
    high = [b.shl(x, e.all_words(16)) for x in words[1::2]]
    return [b.bitcast(b.or_(x, y), kind) for x, y in zip(low, high, strict=True)]


def _halves(wide: Emitter, row: list[Value]) -> list[Value]:
    """Return the lower 16 bits of split vectors, in as few split vectors as hold them."""
    if row[0].type.count < wide.lanes:
        return _stretches(wide, row, rotation.split(wide.lanes))
    halves = _words_as_halves(wide, row)
    return [wide.choose(x, x, range(0, 2 * wide.lanes, 2)) for x in halves]


def _stretches(wide: Emitter, row: list[Value], layout: rotation.Layout) -> list[Value]:
    """Return the lower 16 bits of split vectors, with twice as many elements to a vector.

    The first bit of ``layout``, which distinguishes the vectors, is 0 or the highest.
    """
    highest, lanes = log2(wide.lanes), layout[1:]
    halves, stretches = _words_as_halves(wide, row), []
    for k in range(0, len(halves), 4):
        a, b, c, d = halves[k : k + 4]  # even, odd, even, odd
        which, pairs = (highest, ((a, c), (b, d))) if layout[0] == 0 else (0, ((a, b), (c, d)))
        # The bits from 1 on are the number of a word in a vector, and a word has two halves.
        worth = {bit: 1 << bit for bit in range(1, highest)} | {which: wide.lanes}
        chosen = [
            sum(worth[bit] * (lane >> n & 1) for n, bit in enumerate(lanes[::-1]))
            for lane in range(wide.lanes)
        ]
        stretches += [wide.choose(first, second, chosen) for first, second in pairs]
    return stretches


def _words_as_halves(wide: Emitter, row: list[Value]) -> list[Value]:
    kind = ir.VectorType(I16, 2 * row[0].type.count)
    return [wide.builder.bitcast(x, kind) for x in row]


def _fits_bytes(wide: Emitter, shape: RowShape) -> bool:
    """Return whether bounds fit bytes, and one instruction narrows two vectors to bytes."""
    has_packs = wide.lanes == 32 and "avx512bw" in host_features()
    return has_packs and int(max(shape.rows.bounds, default=0)) <= 127


def _masks_of_bytes(e: Emitter, shape: RowShape, first: Value, second: Value) -> list[Value]:
    """Return the masks of a stretch whose layout is the last of ``TO_BYTES``."""
    shift = in_turn(first.type, log2(shape.fraction))
    numbers = (e.builder.ashr(x, shift) for x in (first, second))
    kind = ir.VectorType(I8, 2 * e.lanes)
    return _masks(e, e.call("llvm.x86.avx512.packsswb.512", kind, *numbers), shape.rows.bounds)


def _masks_of_halves(e: Emitter, shape: RowShape, z: Value) -> list[Value]:
    return _masks(e, z, shape.rows.bounds * shape.fraction)


def _masks(e: Emitter, numbers: Value, all_bounds: np.ndarray) -> list[Value]:
    """Return one mask per plane: bits of the level, lowest first, then the sign.

    Searches by bisection: each bit of the number of bounds that a size reaches selects the next
    bound to compare.
    """
    b, kind = e.builder, numbers.type
    bounds = [in_turn(kind, bound) for bound in all_bounds.tolist()]
    name = f"llvm.smax.v{kind.count}{kind.element}"
    size = e.call(name, kind, numbers, b.not_(numbers))
    masks: list[Value] = []
    while bounds:
        middle = len(bounds) // 2
        mask = b.icmp_signed(">=", size, bounds[middle])
        halves = zip(bounds[:middle], bounds[middle + 1 :], strict=True)
        bounds = [b.select(mask, high, low) for low, high in halves]
        masks.insert(0, mask)
    return [*masks, b.icmp_signed("<", numbers, in_turn(kind, 0))]


def emit_energy(e: Emitter, shape: RowShape, packed: Value, energy: Value) -> None:
    """Emit step 4: the sum of squared levels of one packed row, i32, to ``energy``.

    A level's square is written as a sum over subsets of its magnitude bits, so that one population
    count per subset of planes is enough.
    """
    squares = squared_levels(shape.num_bits)
    total: Value = ir.Constant(I32, shape.dim * squares[0])
    for subset in range(1, len(squares)):
        count = _count_subset(e, shape, packed, subset)
        weight = ir.Constant(I32, _subset_weight(squares, subset))
        total = e.builder.add(total, e.builder.mul(count, weight))
    e.store(total, energy, 0)


def _subset_weight(squares: tuple[int, ...], subset: int) -> int:
    """Return the weight of elements that have all bits of ``subset``, by inclusion-exclusion."""
    within = [x for x in range(subset + 1) if x & subset == x]
    return sum(squares[x] * (-1) ** (subset ^ x).bit_count() for x in within)


def _count_subset(e: Emitter, shape: RowShape, packed: Value, subset: int) -> Value:
    """Count the elements that have all of these magnitude bits, i32."""
    total: Value = ir.Constant(I32, 0)
    planes = [k for k in range(shape.num_bits - 1) if subset >> k & 1]
    at, plane_nbytes = 0, shape.dim // 8
    while at < plane_nbytes:
        nbytes = next(n for n in (8, 4, 2, 1) if n <= plane_nbytes - at)
        words = [e.load(packed, k * plane_nbytes + at, ir.IntType(8 * nbytes)) for k in planes]
        hits = words[0]
        for word in words[1:]:
            hits = e.builder.and_(hits, word)
        total = e.builder.add(total, e.popcount(hits))
        at += nbytes
    return total


def emit_scales(e: Emitter, num_bits: int, norms: Value, energies: Value, scales: Value) -> None:
    """Emit step 5: scales of ``e.lanes`` rows, norm / sqrt(energy) as normal fp16, else zero."""
    b = e.builder
    energy = b.sitofp(e.load(energies, 0, e.words), e.floats)
    length = b.fmul(e.sqrt(energy), e.all_floats(1 / RotatedRows(num_bits).one))
    bits = e.as_words(b.fdiv(e.load(norms, 0, e.floats), length))
    odd = b.and_(b.lshr(bits, e.all_words(13)), e.all_words(1))
    rounded = b.lshr(b.add(b.add(bits, e.all_words(0xFFF)), odd), e.all_words(13))
    rounded = b.sub(rounded, e.all_words(floats.REBIAS))
    above = b.sub(rounded, e.all_words(floats.FP16_SMALLEST_NORMAL))
    width = e.all_words(floats.FP16_INFINITY - floats.FP16_SMALLEST_NORMAL)
    kept = b.select(b.icmp_unsigned("<", above, width), rounded, e.all_words(0))
    e.store(b.trunc(kept, ir.VectorType(I16, e.lanes)), scales, 0)
