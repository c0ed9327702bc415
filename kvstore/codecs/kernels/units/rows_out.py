"""Emits the conversion of sums of integers to an engine's rows: gain, mean, RoPE, rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit.dtypes import HIGH_HALF, rounded
from kvstore.codecs.kernels.emit.emitter import F32, I16, I64, Emitter, Value


def emit_rows(b: Any, lanes: int, as_words: bool, args: tuple[Value, ...]) -> None:
    """Emit one head of some tokens: sums times gains plus means, RoPE applied, as bf16 to memory.

    ``args``: addresses of sums (i32), means, cosines, sines, gains (fp32) and of the target; bytes
    from one token to the next of sums, of angles and of the target; number of tokens; half the
    number of channels that RoPE rotates, and all channels, both multiples of the lanes.
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
    four, step = ir.Constant(I64, 4), ir.Constant(I64, e.lanes)

    def store(channel: Value, value: Value) -> None:
        nbytes = ir.Constant(I64, 4 if as_words else 2)
        _store(e, as_words, b.add(target, b.mul(channel, nbytes)), value)

    with cgutils.for_range_slice(b, ir.Constant(I64, 0), half, step, I64) as (first, _):
        at = b.mul(first, four)
        x, y = row.restored(at), row.restored(b.add(at, b.mul(half, four)))
        cos, sin = (e.load(b.add(table, at), 0, e.floats) for table in angles)
        store(first, b.fsub(b.fmul(x, cos), b.fmul(y, sin)))
        store(b.add(first, half), b.fadd(b.fmul(x, sin), b.fmul(y, cos)))
    with cgutils.for_range_slice(b, b.add(half, half), dim, step, I64) as (first, _):
        store(first, row.restored(b.mul(first, four)))


def _store(e: Emitter, as_words: bool, target: Value, value: Value) -> None:
    words = rounded(e, value)
    if as_words:
        e.store(e.builder.and_(words, e.all_words(HIGH_HALF)), target, 0)
        return
    high = e.builder.lshr(words, e.all_words(16))
    e.store(e.builder.trunc(high, ir.VectorType(I16, e.lanes)), target, 0)
