"""Emits the conversion of an engine's rows to integers: no RoPE, no mean, one size, 16 bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit.dtypes import round_to_bf16
from kvstore.codecs.kernels.emit.emitter import F32, I16, I64, Emitter, Value
from kvstore.codecs.stages.octave_gain import LANES as SQUARE_LANES


def emit_load(b: Any, lanes: int, as_words: bool, args: tuple[Value, ...]) -> None:
    """Emit the load of one head of some tokens as fp32, RoPE undone and mean subtracted.

    ``args``: addresses of the head, of means, cosines, sines and of the target; bytes from one
    token to the next of the head, of angles and of the target; number of tokens; half the number
    of channels that RoPE rotates; all channels. ``as_words``: the engine holds fp32, which is
    rounded to bf16 here.
    """
    source, means, cosines, sines, target, *steps, num_tokens, half, dim = args
    e, four, step = Emitter(b, lanes), ir.Constant(I64, 4), ir.Constant(I64, lanes)
    with cgutils.for_range(b, num_tokens) as loop:
        row, angle, out = (
            b.add(x, b.mul(loop.index, by))
            for x, by in zip((source, ir.Constant(I64, 0), target), steps, strict=True)
        )

        def put(channel: Value, value: Value) -> None:
            at = b.mul(channel, four)
            centred = b.fsub(value, e.load(b.add(means, at), 0, e.floats))
            e.store(centred, b.add(out, at), 0)

        with cgutils.for_range_slice(b, ir.Constant(I64, 0), half, step, I64) as (first, _):
            second = b.add(first, half)
            x, y = (_widened(e, as_words, row, channel) for channel in (first, second))
            at = b.add(angle, b.mul(first, four))
            cos, sin = (e.load(b.add(table, at), 0, e.floats) for table in (cosines, sines))
            put(first, b.fadd(b.fmul(x, cos), b.fmul(y, sin)))
            put(second, b.fsub(b.fmul(y, cos), b.fmul(x, sin)))
        with cgutils.for_range_slice(b, b.add(half, half), dim, step, I64) as (first, _):
            put(first, _widened(e, as_words, row, first))


def _widened(e: Emitter, as_words: bool, row: Value, channel: Value) -> Value:
    b = e.builder
    address = b.add(row, b.mul(channel, ir.Constant(I64, 4 if as_words else 2)))
    if as_words:
        return round_to_bf16(e, e.load(address, 0, e.words))
    halves = e.load(address, 0, ir.VectorType(I16, e.lanes))
    return e.as_floats(b.shl(b.zext(halves, e.words), e.all_words(16)))


def emit_squares(b: Any, lanes: int, args: tuple[Value, ...]) -> None:
    """Emit sums of squares of fp32 rows, added in the order of ``octave_gain``.

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
    half = lanes // 2
    for _ in range(lanes.bit_length() - 1):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [x for pair in pairs for x in e.zipped(*pair)]
    for row in rows:
        e.store(row, target, 0)
        target = b.add(target, target_step)
