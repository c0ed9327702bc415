"""Emits the conversion of an engine's rows to integers and codes, and of sums back to rows.

To integers: no RoPE, no mean, one size, 16 bits. To codes: bit planes, as ``IntegerLevels`` of
``stages.integer_klt`` defines them. From sums of integers: gain, mean, RoPE, rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit.dtypes import HIGH_HALF, round_to_bf16, rounded
from kvstore.codecs.kernels.emit.emitter import F32, I16, I32, I64, Emitter, Value
from kvstore.codecs.stages.gain import LANES as SQUARE_LANES

TOKENS = 64


@contextmanager
def _vectors(e: Emitter, start: Value, stop: Value) -> Iterator[Value]:
    """Emit a loop over vectors of channels; the last one may overlap the one before, or ``start``.

    So channels beside those that RoPE rotates are written first.
    """
    b, step = e.builder, ir.Constant(I64, e.lanes)
    with cgutils.for_range_slice(b, start, stop, step, I64) as (first, _):
        last = b.sub(stop, step)
        yield b.select(b.icmp_signed("<", first, last), first, last)


def emit_load(b: Any, lanes: int, as_words: bool, args: tuple[Value, ...]) -> None:
    """Emit the load of one head of some tokens as fp32, RoPE undone and mean subtracted.

    ``args``: addresses of the head, of means, cosines, sines and of the target; bytes from one
    token to the next of the head, of angles and of the target; number of tokens; half the number
    of channels that RoPE rotates; all channels. ``as_words``: the engine holds fp32, which is
    rounded to bf16 here.
    """
    source, means, cosines, sines, target, *steps, num_tokens, half, dim = args
    e, zero, four = Emitter(b, lanes), ir.Constant(I64, 0), ir.Constant(I64, 4)
    with cgutils.for_range(b, num_tokens) as loop:
        row, angle, out = (
            b.add(x, b.mul(loop.index, by))
            for x, by in zip((source, zero, target), steps, strict=True)
        )

        def put(channel: Value, value: Value) -> None:
            at = b.mul(channel, four)
            centred = b.fsub(value, e.load(b.add(means, at), 0, e.floats))
            e.store(centred, b.add(out, at), 0)

        with _vectors(e, b.add(half, half), dim) as first:
            put(first, _widened(e, as_words, row, first))
        with _vectors(e, zero, half) as first:
            second = b.add(first, half)
            x, y = (_widened(e, as_words, row, channel) for channel in (first, second))
            at = b.add(angle, b.mul(first, four))
            cos, sin = (e.load(b.add(table, at), 0, e.floats) for table in (cosines, sines))
            put(first, b.fadd(b.fmul(x, cos), b.fmul(y, sin)))
            put(second, b.fsub(b.fmul(y, cos), b.fmul(x, sin)))


def _widened(e: Emitter, as_words: bool, row: Value, channel: Value) -> Value:
    b = e.builder
    address = b.add(row, b.mul(channel, ir.Constant(I64, 4 if as_words else 2)))
    if as_words:
        return round_to_bf16(e, e.load(address, 0, e.words))
    halves = e.load(address, 0, ir.VectorType(I16, e.lanes))
    return e.as_floats(b.shl(b.zext(halves, e.words), e.all_words(16)))


def emit_squares(b: Any, lanes: int, args: tuple[Value, ...]) -> None:
    """Emit sums of squares of fp32 rows, added in the order of ``gain.squared_sizes``.

    ``args``: address of the rows, bytes from one to the next, their length, address of the sums,
    number of rows.
    """
    rows, row_step, width, target, count = args
    e, num = Emitter(b, lanes), SQUARE_LANES // lanes
    totals = [e.variable(e.floats) for _ in range(num)]
    with cgutils.for_range(b, count) as loop:
        row = b.add(rows, b.mul(loop.index, row_step))
        for total, square in zip(totals, _squares(e, row, num), strict=True):
            b.store(square, total)
        start, step = (ir.Constant(I64, SQUARE_LANES) for _ in range(2))
        with cgutils.for_range_slice(b, start, width, step, I64) as (first, _):
            at = b.add(row, b.mul(first, ir.Constant(I64, 4)))
            for total, square in zip(totals, _squares(e, at, num), strict=True):
                b.store(b.fadd(b.load(total), square), total)
        folded = _folded(e, [b.load(total) for total in totals])
        at = b.add(target, b.mul(loop.index, ir.Constant(I64, 4)))
        e.store(folded, at, 0)


def _squares(e: Emitter, at: Value, num: int) -> list[Value]:
    loaded = [e.load(at, 4 * e.lanes * k, e.floats) for k in range(num)]
    return [e.builder.fmul(x, x) for x in loaded]


def _folded(e: Emitter, sums: list[Value]) -> Value:
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [e.builder.fadd(x, y) for x, y in zip(sums[:half], sums[half:], strict=True)]
    (total,), distance = sums, e.lanes // 2
    while distance:
        moved = e.choose(total, total, ((k + distance) % e.lanes for k in range(e.lanes)))
        total, distance = e.builder.fadd(total, moved), distance // 2
    return e.builder.extract_element(total, ir.Constant(ir.IntType(32), 0))


def emit_integers(b: Any, lanes: int, args: tuple[Value, ...]) -> None:
    """Emit fp32 rows, each times its factor, rounded to 16 bits.

    ``args``: addresses of rows, factors and target; length of a row and number of rows, which are
    contiguous.
    """
    rows, factors, target, width, count = args
    e = Emitter(b, lanes)
    with cgutils.for_range(b, count) as loop:
        factor = e.load(b.add(factors, b.mul(loop.index, ir.Constant(I64, 4))), 0, F32)
        all_factors, base = e.splat(factor), b.mul(loop.index, width)
        step = ir.Constant(I64, lanes)
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), width, step, I64) as (first, _):
            at = b.add(base, first)
            values = e.load(b.add(rows, b.mul(at, ir.Constant(I64, 4))), 0, e.floats)
            words = b.fptosi(e.nearest(b.fmul(values, all_factors)), e.words)
            halves = b.trunc(words, ir.VectorType(I16, lanes))
            e.store(halves, b.add(target, b.mul(at, ir.Constant(I64, 2))), 0)


def emit_transposed(b: Any, lanes: int, args: tuple[Value, ...]) -> None:
    """Emit the transpose of ``lanes`` by ``lanes`` words.

    ``args``: address and bytes from row to row of the source and of the target.
    """
    source, source_step, target, target_step = args
    e = Emitter(b, lanes)
    rows = []
    for _ in range(lanes):
        rows.append(e.load(source, 0, e.words))
        source = b.add(source, source_step)
    for row in e.transposed(rows):
        e.store(row, target, 0)
        target = b.add(target, target_step)


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


def emit_rows(b: Any, lanes: int, as_words: bool, args: tuple[Value, ...]) -> None:
    """Emit one head of some tokens: sums times gains plus means, RoPE applied, as bf16 to memory.

    ``args``: addresses of sums (i32), means, cosines, sines, gains (fp32) and of the target; bytes
    from one token to the next of sums, of angles and of the target; number of tokens; half the
    number of channels that RoPE rotates, and all channels, each 0 or at least the lanes.
    ``as_words``: the engine holds fp32, whose upper halves become the bf16.
    """
    sums, means, cosines, sines, gains, target, *steps, num_tokens, half, dim = args
    e = Emitter(b, lanes)
    with cgutils.for_range(b, num_tokens) as loop:
        offsets = [b.mul(loop.index, step) for step in steps]
        row = _Row(
            e,
            b.add(sums, offsets[0]),
            means,
            e.splat(e.load(b.add(gains, b.mul(loop.index, ir.Constant(I64, 4))), 0, F32)),
        )
        angles = (b.add(cosines, offsets[1]), b.add(sines, offsets[1]))
        _emit_row(row, as_words, b.add(target, offsets[2]), angles, half, dim)


@dataclass(frozen=True)
class _Row:
    """One head of one token: addresses of its sums and means, and its gain."""

    e: Emitter
    sums: Value
    means: Value
    gain: Value

    def restored(self, at: Value) -> Value:
        """Restore a vector of fp32 values, ``at`` bytes from the start of the head."""
        e, b = self.e, self.e.builder
        number = b.sitofp(e.load(b.add(self.sums, at), 0, e.words), e.floats)
        return b.fadd(b.fmul(number, self.gain), e.load(b.add(self.means, at), 0, e.floats))


def _emit_row(
    row: _Row, as_words: bool, target: Value, angles: tuple[Value, Value], half: Value, dim: Value
) -> None:
    e, b = row.e, row.e.builder
    four = ir.Constant(I64, 4)

    def store(channel: Value, value: Value) -> None:
        nbytes = ir.Constant(I64, 4 if as_words else 2)
        _store(e, as_words, b.add(target, b.mul(channel, nbytes)), value)

    with _vectors(e, b.add(half, half), dim) as first:
        store(first, row.restored(b.mul(first, four)))
    with _vectors(e, ir.Constant(I64, 0), half) as first:
        at = b.mul(first, four)
        x, y = row.restored(at), row.restored(b.add(at, b.mul(half, four)))
        cos, sin = (e.load(b.add(table, at), 0, e.floats) for table in angles)
        store(first, b.fsub(b.fmul(x, cos), b.fmul(y, sin)))
        store(b.add(first, half), b.fadd(b.fmul(x, sin), b.fmul(y, cos)))


def _store(e: Emitter, as_words: bool, target: Value, value: Value) -> None:
    words = rounded(e, value)
    if as_words:
        e.store(e.builder.and_(words, e.all_words(HIGH_HALF)), target, 0)
        return
    high = e.builder.lshr(words, e.all_words(16))
    e.store(e.builder.trunc(high, ir.VectorType(I16, e.lanes)), target, 0)
