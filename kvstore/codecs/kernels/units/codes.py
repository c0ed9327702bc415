"""Emits the coding of integers as bit planes; the counterpart of ``integer_klt.IntegerLevels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit.emitter import F32, I32, I64, Emitter, Value

TOKENS = 64


@dataclass(frozen=True)
class _Tables:
    """The tables of one component: addresses of bounds and values, and the fp32 size of a one."""

    bounds: Value
    values: Value
    rate: Value


def emit_codes(b: Any, lanes: int, bits: int, args: tuple[Value, ...]) -> None:
    """Emit codes of 64 tokens, and the sums that fit gains, for components of equal ``bits``.

    ``args``: addresses of the first component's 64 integers, bounds (i32), values and rate (fp32);
    bytes from one component's bounds or values to the next's; addresses of the first plane, of 64
    sums of products and of 64 sums of squares; number of components. Planes are 64 bits each.
    """
    numbers, bounds, values, rates, table_step, planes, along, energy, count = args
    e, num = Emitter(b, lanes), TOKENS // lanes
    sums = [[e.variable(e.floats) for _ in range(num)] for _ in range(2)]
    for address, totals in zip((along, energy), sums, strict=True):
        for k, total in enumerate(totals):
            b.store(e.load(address, 4 * lanes * k, e.floats), total)
    with cgutils.for_range(b, count) as loop:
        table = b.mul(loop.index, table_step)
        rate = e.load(b.add(rates, b.mul(loop.index, ir.Constant(I64, 4))), 0, F32)
        tables = _Tables(b.add(bounds, table), b.add(values, table), rate)
        row = b.add(numbers, b.mul(loop.index, ir.Constant(I64, 4 * TOKENS)))
        masks = [
            _emit_vector(e, bits, e.load(row, 4 * lanes * k, e.words), tables, (x, y))
            for k, (x, y) in enumerate(zip(*sums, strict=True))
        ]
        target = b.add(planes, b.mul(loop.index, ir.Constant(I64, 8 * bits)))
        for plane, vectors in enumerate(zip(*masks, strict=True)):
            at = 8 * plane
            for bits_of_plane in e.whole_bytes(vectors):
                e.store(bits_of_plane, target, at)
                at += bits_of_plane.type.width // 8
    for address, totals in zip((along, energy), sums, strict=True):
        for k, total in enumerate(totals):
            e.store(b.load(total), address, 4 * lanes * k)


def _emit_vector(
    e: Emitter, bits: int, numbers: Value, tables: _Tables, sums: tuple[Value, Value]
) -> list[Value]:
    """Code one vector of integers and add to the sums; return masks of the planes, lowest first."""
    b, zero = e.builder, e.all_words(0)
    negative = b.icmp_signed("<", numbers, zero)
    sizes = b.select(negative, b.sub(zero, numbers), numbers)
    half = 1 << (bits - 1)
    bounds = [e.splat_word(e.load(tables.bounds, 4 * k, I32)) for k in range(half - 1)]
    values = [e.splat(e.load(tables.values, 4 * k, F32)) for k in range(half)]
    masks: list[Value] = []
    while bounds:
        middle = len(bounds) // 2
        mask = b.icmp_signed(">", sizes, bounds[middle])
        bounds = [
            b.select(mask, high, low)
            for low, high in zip(bounds[:middle], bounds[middle + 1 :], strict=True)
        ]
        masks.insert(0, mask)
    for mask in masks:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b.select(mask, high, low) for low, high in pairs]
    exact = b.fmul(b.sitofp(sizes, e.floats), e.splat(tables.rate))
    along, energy = sums
    b.store(b.fadd(b.load(along), b.fmul(exact, values[0])), along)
    b.store(b.fadd(b.load(energy), b.fmul(values[0], values[0])), energy)
    positive = b.not_(negative)
    return [b.xor(mask, negative) for mask in masks] + [positive]
