"""Norm, butterflies and Paley's matrix on vectors; the counterpart of ``codecs.rotation``.

A row in natural order has element ``lanes * i + lane`` in lane ``lane`` of vector ``i``. A
butterfly of distance ``2^k`` pairs elements whose numbers differ in bit ``k``. If that bit tells
vectors apart, it is an addition and a subtraction of whole vectors. If it tells lanes apart, two
shuffles first exchange it with the bit that tells the two vectors of a pair apart. A split row (see
``dtypes``) begins with bit 0 there, and after the last lane bit the row is in natural order; on the
way back everything happens in reverse. Nothing else is ever shuffled.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from kvstore.codecs.kernels.emitter import I32, SIGN_BIT, Emitter, Value
from kvstore.codecs.rotation import Order, base_matrix


def rotate(e: Emitter, order: Order, row: list[Value]) -> list[Value]:
    """Hadamard matrix times a split row, in natural order."""
    row = _add_and_subtract(e, row, 1)
    for bit in range(_log2(e.lanes)):
        row = _add_and_subtract(e, _exchange(e, row, 1 << bit), 1)
    for bit in range(1, _log2(order.power // e.lanes)):
        row = _add_and_subtract(e, row, 1 << bit)
    return _multiply_base(e, base_matrix(order.base), row)


def rotate_back(e: Emitter, order: Order, row: list[Value]) -> list[Value]:
    """Transposed Hadamard matrix times a row in natural order, split."""
    row = _multiply_base(e, base_matrix(order.base).T, row)
    for bit in reversed(range(_log2(order.power // e.lanes))):
        row = _add_and_subtract(e, row, 1 << bit)
    for bit in reversed(range(_log2(e.lanes))):
        row = _add_and_subtract(e, _exchange(e, row, 1 << bit), 1)
    return row


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _add_and_subtract(e: Emitter, row: list[Value], distance: int) -> list[Value]:
    def one(i: int) -> Value:
        if i & distance:
            return e.builder.fsub(row[i ^ distance], row[i])
        return e.builder.fadd(row[i], row[i | distance])

    return [one(i) for i in range(len(row))]


def _exchange(e: Emitter, row: list[Value], lane_bit: int) -> list[Value]:
    """Of each pair, lanes without ``lane_bit`` in the first vector, those with in the second."""
    without = [k & ~lane_bit | (e.lanes if k & lane_bit else 0) for k in range(e.lanes)]
    with_bit = [k | lane_bit for k in without]
    pairs = zip(row[::2], row[1::2], strict=True)
    return [e.choose(a, b, lanes) for a, b in pairs for lanes in (without, with_bit)]


def _multiply_base(e: Emitter, matrix: np.ndarray, row: list[Value]) -> list[Value]:
    if len(matrix) == 1:
        return row
    groups = _groups(row, len(row) // len(matrix))
    return [_signed_sum(e, signs, place) for signs in matrix for place in zip(*groups, strict=True)]


def _groups(row: list[Value], length: int) -> list[list[Value]]:
    return [row[i : i + length] for i in range(0, len(row), length)]


def _signed_sum(e: Emitter, signs: np.ndarray, terms: tuple[Value, ...]) -> Value:
    total = terms[0] if signs[0] > 0 else e.flip(terms[0], e.all_words(SIGN_BIT))
    for sign, term in zip(signs[1:], terms[1:], strict=True):
        total = e.builder.fadd(total, term) if sign > 0 else e.builder.fsub(total, term)
    return total


def squared_norm(e: Emitter, order: Order, row: list[Value]) -> Value:
    """Sum of squares of a split row, a scalar; its order is that of ``codecs.rotation``."""
    pairs = zip(row[::2], row[1::2], strict=True)
    terms = [e.square_and_add(a, e.builder.fmul(b, b)) for a, b in pairs]
    per_group = order.power // (2 * e.lanes)
    while len(terms) // per_group % 2 == 0:
        terms = _fold(e, terms)
    first, *others = _groups(terms, per_group)
    for group in others:
        first = [e.builder.fadd(a, b) for a, b in zip(first, group, strict=True)]
    while len(first) > 1:
        first = _fold(e, first)
    return _sum_lanes(e, first[0])


def _fold(e: Emitter, terms: list[Value]) -> list[Value]:
    half = len(terms) // 2
    return [e.builder.fadd(a, b) for a, b in zip(terms[:half], terms[half:], strict=True)]


def _sum_lanes(e: Emitter, total: Value) -> Value:
    for bit in reversed(range(_log2(e.lanes))):
        swapped = e.choose(total, total, (lane ^ 1 << bit for lane in range(e.lanes)))
        total = e.builder.fadd(total, swapped)
    return e.builder.extract_element(total, ir.Constant(I32, 0))
