"""Emits norms, butterflies and Paley's matrix on vectors; the counterpart of ``rows.rotation``.

Rows hold whole numbers. Intermediate sums may wrap around, and may be added in any order.

A *stretch* is two vectors of a row. Its *layout* describes the places of its elements, as a list of
bits of an element's number: first the bit that distinguishes the two vectors, then the bits of the
lane, from the highest. A butterfly of distance ``2^k`` pairs elements whose numbers differ in bit
``k``. If that bit is the first of the layout, the butterfly is an addition and a subtraction of
whole vectors. So stretches change from layout to layout, by two shuffles each, until every bit has
been first. Bits beyond those of a stretch always distinguish vectors. A split row (see ``dtypes``)
has bit 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from llvmlite import ir

from kvstore.codecs.kernels.emit.emitter import Emitter, Value, in_turn, log2
from kvstore.codecs.rows.rotation import Order, base_matrix

Layout: TypeAlias = tuple[int, ...]


def natural(lanes: int) -> Layout:
    """Return the layout of a stretch whose elements lie in ascending order."""
    return tuple(range(log2(lanes), -1, -1))


def split(lanes: int) -> Layout:
    """Return the layout of even elements in one vector and odd elements in the other."""
    return (0, *range(log2(lanes), 0, -1))


def exchanged(layout: Layout, lane_bits: Sequence[int]) -> list[Layout]:
    """Return ``layout`` and its successors; each exchanges the first bit with one of these."""
    layouts = [layout]
    for bit in lane_bits:
        swapped = list(layouts[-1])
        swapped[0], swapped[-1 - bit] = swapped[-1 - bit], swapped[0]
        layouts.append(tuple(swapped))
    return layouts


def rotate(e: Emitter, order: Order, row: list[Value], layouts: Sequence[Layout]) -> list[Value]:
    """Multiply a row by the Hadamard matrix; its layout changes from the first to the last."""
    row = through(e, add_and_subtract(e, row, 1), layouts)
    for bit in range(1, log2(order.power // e.lanes)):
        row = add_and_subtract(e, row, 1 << bit)
    return _multiply_base(e, base_matrix(order.base), row)


def between_stretches(e: Emitter, order: Order, row: list[Value]) -> list[Value]:
    """Apply the part of the transposed Hadamard matrix that combines whole stretches."""
    row = _multiply_base(e, base_matrix(order.base).T, row)
    for bit in reversed(range(1, log2(order.power // e.lanes))):
        row = add_and_subtract(e, row, 1 << bit)
    return row


def through(e: Emitter, row: list[Value], layouts: Sequence[Layout]) -> list[Value]:
    """Rearrange a row through all layouts, with a butterfly of the first bit after each step."""
    for old, new in zip(layouts, layouts[1:], strict=False):
        row = add_and_subtract(e, rearranged(e, row, old, new), 1)
    return row


def rearranged(e: Emitter, row: list[Value], old: Layout, new: Layout) -> list[Value]:
    """Bring each stretch of a row from one layout to another."""
    lanes = _old_lanes(old, new)
    halves = (lanes[: e.lanes], lanes[e.lanes :])
    pairs = zip(row[::2], row[1::2], strict=True)
    return [e.choose(a, b, half) for a, b in pairs for half in halves]


def _old_lanes(old: Layout, new: Layout) -> list[int]:
    """Return, for each lane of a stretch, the lane from which its element comes."""
    last = len(old) - 1
    moves = [(last - new.index(bit), last - k) for k, bit in enumerate(old)]
    return [sum((lane >> n & 1) << o for n, o in moves) for lane in range(2 << last)]


def add_and_subtract(e: Emitter, row: list[Value], distance: int) -> list[Value]:
    """Do a butterfly of vectors that are ``distance`` apart: their sums and differences."""

    def one(i: int) -> Value:
        if i & distance:
            return e.builder.sub(row[i ^ distance], row[i])
        return e.builder.add(row[i], row[i | distance])

    return [one(i) for i in range(len(row))]


def _multiply_base(e: Emitter, matrix: np.ndarray, row: list[Value]) -> list[Value]:
    if len(matrix) == 1:
        return row
    groups = _groups(row, len(row) // len(matrix))
    return [_signed_sum(e, signs, terms) for signs in matrix for terms in zip(*groups, strict=True)]


def _groups(row: list[Value], length: int) -> list[list[Value]]:
    return [row[i : i + length] for i in range(0, len(row), length)]


def _signed_sum(e: Emitter, signs: np.ndarray, terms: tuple[Value, ...]) -> Value:
    total = terms[0] if signs[0] > 0 else e.builder.neg(terms[0])
    for sign, term in zip(signs[1:], terms[1:], strict=True):
        total = e.builder.add(total, term) if sign > 0 else e.builder.sub(total, term)
    return total


def mixed(e: Emitter, order: Order, row: list[Value]) -> list[Value]:
    """Multiply a row in natural order, of vectors of several groups, by the Hadamard matrix."""
    for bit in range(log2(order.power)):
        row = [butterfly_of_lanes(e, x, 1 << bit) for x in row]
    return _multiply_groups(e, base_matrix(order.base), order.power, row)


def mixed_back(e: Emitter, order: Order, row: list[Value], first_bit: int) -> list[Value]:
    """Multiply such a row by the transposed matrix, but for butterflies below ``first_bit``."""
    row = _multiply_groups(e, base_matrix(order.base).T, order.power, row)
    for bit in range(first_bit, log2(order.power)):
        row = [butterfly_of_lanes(e, x, 1 << bit) for x in row]
    return row


def butterfly_of_lanes(e: Emitter, x: Value, distance: int) -> Value:
    """Do a butterfly of lanes of one vector that are ``distance`` apart."""
    lanes = np.arange(e.lanes)
    signs = np.stack([np.ones(e.lanes), np.where(lanes & distance, -1, 1)])
    return _sum_by_lanes(e, [e.choose(x, x, lanes ^ distance), x], signs)


def _multiply_groups(e: Emitter, matrix: np.ndarray, power: int, row: list[Value]) -> list[Value]:
    """Make each group a signed sum of all groups; every vector is turned by each of its groups."""
    lanes, num = np.arange(e.lanes), e.lanes // power
    turns = [(k, turn) for k in range(len(row)) for turn in range(num)]
    turned = [e.choose(row[k], row[k], (lanes + power * turn) % e.lanes) for k, turn in turns]
    sources = np.array([num * k + (lanes // power + turn) % num for k, turn in turns])
    groups = (num * k + lanes // power for k in range(len(row)))
    return [_sum_by_lanes(e, turned, matrix[group, sources]) for group in groups]


def _sum_by_lanes(e: Emitter, terms: list[Value], signs: np.ndarray) -> Value:
    """Add up vectors with a sign for each lane, (terms, lanes), those of like signs first.

    Of lanes that are subtracted bits are flipped: -x is ~x + 1.
    """
    b, kind, sums = e.builder, terms[0].type, dict[tuple[int, ...], Value]()
    for term, own in zip(terms, signs.astype(int), strict=True):
        alike = tuple(own * own[0])
        add_up = b.add if own[0] > 0 else b.sub
        sums[alike] = add_up(sums.get(alike, ir.Constant(kind, None)), term)
    negative = np.array([*sums]) < 0
    total = in_turn(kind, *negative.sum(axis=0).tolist())
    for term, mask in zip(sums.values(), negative, strict=True):
        total = b.add(total, b.xor(term, in_turn(kind, *(-1 * mask).tolist())))
    return total


def partial_norm(e: Emitter, order: Order, neighbours: list[Value]) -> Value:
    """Add up neighbours' sums of squares to one per lane, in the order of ``squared_norms``.

    Lanes that a group of a mixed row does not have are zero.
    """
    if e.lanes > order.power // 2:
        return _mixed_norm(e, order, neighbours)
    terms, per_group = neighbours, order.power // (2 * e.lanes)
    while len(terms) // per_group % 2 == 0:
        terms = _fold(e, terms)
    first, *others = _groups(terms, per_group)
    for group in others:
        first = [e.builder.fadd(a, b) for a, b in zip(first, group, strict=True)]
    while len(first) > 1:
        first = _fold(e, first)
    return first[0]


def _mixed_norm(e: Emitter, order: Order, terms: list[Value]) -> Value:
    """Add up groups of ``power // 2`` lanes each: upper halves to lower ones, then in order."""
    b, places, num = e.builder, order.power // 2, order.base

    def lanes_from(first: int) -> Value:
        at, within = divmod(first, e.lanes)
        return e.choose(terms[at], terms[min(at + 1, len(terms) - 1)], within + np.arange(e.lanes))

    while num % 2 == 0:
        num //= 2
        starts = range(0, num * places, e.lanes)
        terms = [b.fadd(lanes_from(k), lanes_from(num * places + k)) for k in starts]
    total = terms[0]
    for group in range(1, num):
        total = b.fadd(total, lanes_from(group * places))
    return e.choose(total, e.all_floats(0.0), [k + e.lanes * (k >= places) for k in range(e.lanes)])


def sums_of_lanes(e: Emitter, rows: list[Value]) -> Value:
    """Return one vector with the sum of each row, for as many rows as a vector has lanes.

    Repeatedly adds the upper half of the lanes to the lower half.
    """
    half = len(rows) // 2
    while half:
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [e.builder.fadd(*_halves(e, a, b, half)) for a, b in pairs]
        half //= 2
    return rows[0]


def _halves(e: Emitter, a: Value, b: Value, bit: int) -> tuple[Value, Value]:
    """Return the lanes of two vectors whose numbers lack ``bit``, and those whose numbers have it.

    Lanes of ``b`` are placed where the number of the lane has ``bit``.
    """
    without = [k & ~bit | (e.lanes if k & bit else 0) for k in range(e.lanes)]
    return e.choose(a, b, without), e.choose(a, b, (k | bit for k in without))


def _fold(e: Emitter, terms: list[Value]) -> list[Value]:
    half = len(terms) // 2
    return [e.builder.fadd(a, b) for a, b in zip(terms[:half], terms[half:], strict=True)]
