"""Emits rANS of one row for processors with AVX-512: two vectors hold the states of all lanes.

See ``entropy.rans``. A look-up is one gather; the words that a vector needs are expanded to the
lanes that need them, and compressed from these when coding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.entropy.rans import LANES, LOWEST
from kvstore.codecs.entropy.tables import PRECISION, TOTAL
from kvstore.codecs.kernels.emit.emitter import I8, I16, I32, I64, Emitter, Value

VECTOR = 16
NUM = LANES // VECTOR
_BITS = ir.VectorType(ir.IntType(1), VECTOR)


def emit_decoded_row(b: Any, args: tuple[Value, ...]) -> None:
    """Emit the decoding of one row.

    ``args``: addresses of the states, of the address of the next word, of the class's slots and of
    the row's first byte; number of tokens, i64. Rows are padded to whole vectors.
    """
    states, pointer, slots, target, num_tokens = args
    e = Emitter(b, VECTOR)
    lanes = _Lanes(e, states, pointer)
    with cgutils.for_range(b, _blocks(b, num_tokens)) as loop:
        out = b.add(target, b.mul(loop.index, ir.Constant(I64, LANES)))
        for k in range(NUM):
            x = b.load(lanes.states[k])
            entry = _gathered(e, slots, b.and_(x, e.all_words(TOTAL - 1)))
            frequency = b.and_(b.lshr(entry, e.all_words(PRECISION)), e.all_words(TOTAL - 1))
            turned = b.mul(frequency, b.lshr(x, e.all_words(PRECISION)))
            turned = b.add(turned, b.and_(entry, e.all_words(TOTAL - 1)))
            active = _active(e, num_tokens, loop.index, k)
            turned = b.select(active, turned, x)
            low = b.icmp_unsigned("<", turned, e.all_words(LOWEST))
            at = b.load(lanes.at)
            words = b.zext(e.load(at, 0, ir.VectorType(I16, VECTOR)), e.words)
            name = "llvm.x86.avx512.mask.expand.v16i32"
            expanded = e.call(name, e.words, words, e.all_words(0), low)
            fuller = b.or_(b.shl(turned, e.all_words(16)), expanded)
            b.store(b.select(low, fuller, turned), lanes.states[k])
            lanes.advance(low)
            found = b.trunc(b.lshr(entry, e.all_words(24)), ir.VectorType(I8, VECTOR))
            e.store(found, out, VECTOR * k)
    lanes.keep()


def emit_coded_row(b: Any, args: tuple[Value, ...]) -> None:
    """Emit the coding of one row, from its end; words go upwards in memory, the last one first.

    ``args``: addresses of the states, of the address of the next word, of the class's entries of
    ``SymbolTables.coding`` and of the row's first symbol; number of tokens, i64.
    """
    states, pointer, entries, source, num_tokens = args
    e = Emitter(b, VECTOR)
    lanes = _Lanes(e, states, pointer)
    doubles = ir.VectorType(ir.DoubleType(), VECTOR)
    backwards = e.word_list(range(VECTOR - 1, -1, -1))
    blocks = _blocks(b, num_tokens)
    with cgutils.for_range(b, blocks) as loop:
        block = b.sub(b.sub(blocks, ir.Constant(I64, 1)), loop.index)
        at_block = b.add(source, b.mul(block, ir.Constant(I64, LANES)))
        for k in reversed(range(NUM)):
            x = b.load(lanes.states[k])
            symbols = b.zext(e.load(at_block, VECTOR * k, ir.VectorType(I8, VECTOR)), e.words)
            active = _active(e, num_tokens, block, k)
            symbols = b.select(active, symbols, e.all_words(0))
            entry = _gathered(e, entries, symbols)
            frequency = b.and_(entry, e.all_words(0xFFFF))
            limit = b.shl(frequency, e.all_words(32 - PRECISION))
            full = b.and_(b.icmp_unsigned(">=", x, limit), active)
            turned = b.shuffle_vector(x, x, backwards)
            wide = b.sext(full, e.words)
            mask = b.icmp_unsigned("!=", b.shuffle_vector(wide, wide, backwards), e.all_words(0))
            name = "llvm.x86.avx512.mask.compress.v16i32"
            words = e.call(name, e.words, turned, e.all_words(0), mask)
            e.store(b.trunc(words, ir.VectorType(I16, VECTOR)), b.load(lanes.at), 0)
            lanes.advance(full)
            less = b.select(full, b.lshr(x, e.all_words(16)), x)
            # fp64 holds both numbers, and their quotient is exact enough to be rounded down.
            quotient = b.fdiv(b.uitofp(less, doubles), b.uitofp(frequency, doubles))
            whole = b.fptoui(quotient, e.words)
            rest = b.sub(less, b.mul(whole, frequency))
            rest = b.add(rest, b.lshr(entry, e.all_words(16)))
            coded = b.add(b.shl(whole, e.all_words(PRECISION)), rest)
            b.store(b.select(active, coded, x), lanes.states[k])
    lanes.keep()


class _Lanes:
    """The states of all lanes, and the address of the next word, in registers."""

    def __init__(self, e: Emitter, states: Value, pointer: Value) -> None:
        b = e.builder
        self._e, self._states, self._pointer = e, states, pointer
        self.states: Sequence[Value] = [e.variable(e.words) for _ in range(NUM)]
        for k, state in enumerate(self.states):
            b.store(e.load(states, 4 * VECTOR * k, e.words), state)
        self.at = e.variable(I64)
        b.store(e.load(pointer, 0, I64), self.at)

    def advance(self, mask: Value) -> None:
        """Go to the word after those of the lanes in ``mask``."""
        b = self._e.builder
        count = b.zext(self._e.popcount(b.bitcast(mask, I16)), I64)
        b.store(b.add(b.load(self.at), b.shl(count, ir.Constant(I64, 1))), self.at)

    def keep(self) -> None:
        """Store states and address to memory."""
        for k, state in enumerate(self.states):
            self._e.store(self._e.builder.load(state), self._states, 4 * VECTOR * k)
        self._e.store(self._e.builder.load(self.at), self._pointer, 0)


def _blocks(b: Any, num_tokens: Value) -> Value:
    more = b.add(num_tokens, ir.Constant(I64, LANES - 1))
    return b.udiv(more, ir.Constant(I64, LANES))


def _active(e: Emitter, num_tokens: Value, block: Value, vector: int) -> Value:
    """Return the mask of the lanes that have a token in this block."""
    b = e.builder
    first = b.add(b.mul(block, ir.Constant(I64, LANES)), ir.Constant(I64, VECTOR * vector))
    left = e.splat_word(b.trunc(b.sub(num_tokens, first), I32))
    return b.icmp_signed("<", e.word_list(range(VECTOR)), left)


def _gathered(e: Emitter, table: Value, index: Value) -> Value:
    """Load the words of a table that have these indices."""
    pointer = e.builder.inttoptr(table, I8.as_pointer())
    every = ir.Constant(_BITS, [ir.Constant(ir.IntType(1), 1)] * VECTOR)
    name = "llvm.x86.avx512.mask.gather.dpi.512"
    return e.call(name, e.words, e.all_words(0), pointer, index, every, ir.Constant(I32, 4))
