"""rANS in numba; see ``entropy.rans`` for the format.

On processors with AVX-512, two vectors hold the states of all lanes. A look-up is one gather; the
words that a vector needs are expanded to the lanes that need them, and compressed from these when
coding.

The functions release the GIL. A slot is below 4096 by construction, bytes come from a table of the
profile, and words are counted after every row: the caller appends as many as a row can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from kvstore.codecs.entropy.rans import LANES, LOWEST
from kvstore.codecs.entropy.tables import PRECISION, TOTAL
from kvstore.codecs.kernels.emit.emitter import I8, I16, I32, I64, Emitter, Value
from kvstore.codecs.kernels.units.kernel_parts import HOST, plain
from kvstore.codecs.loops.numba_functions import address_of, compiled, sources_of

SOURCES = sources_of(__file__)

VECTOR = 16
NUM = LANES // VECTOR
_BITS = ir.VectorType(ir.IntType(1), VECTOR)
VECTORS = HOST.lanes == VECTOR


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


_decoded_row: Any = plain(emit_decoded_row)
_coded_row: Any = plain(emit_coded_row)


@njit
def _decode_row(words, used, slots, states, found, num_tokens):
    """Decode one row, and return the number of words used so far."""
    for token in range(num_tokens):
        state = states[token % LANES]
        entry = slots[state & np.uint32(TOTAL - 1)]
        found[token] = np.uint8(entry >> np.uint32(24))
        frequency = (entry >> np.uint32(PRECISION)) & np.uint32(TOTAL - 1)
        state = np.uint32(frequency * (state >> np.uint32(PRECISION)))
        state = np.uint32(state + (entry & np.uint32(TOTAL - 1)))
        if state < np.uint32(LOWEST):
            state = np.uint32(state << np.uint32(16)) | np.uint32(words[used])
            used += 1
        states[token % LANES] = state
    return used


@njit
def _code_row(symbols, entries, states, words, used, num_tokens):
    """Code one row, from its end, and return the number of words so far."""
    for token in range(num_tokens - 1, -1, -1):
        entry, state = entries[symbols[token]], states[token % LANES]
        share = entry & np.uint32(0xFFFF)
        if np.uint64(state) >= np.uint64(share) << np.uint64(32 - PRECISION):
            words[used] = np.uint16(state & np.uint32(0xFFFF))
            used += 1
            state = np.uint32(state >> np.uint32(16))
        quotient = np.uint32(state // share)
        rest = np.uint32(state - np.uint32(quotient * share)) + (entry >> np.uint32(16))
        states[token % LANES] = np.uint32(quotient << np.uint32(PRECISION)) + np.uint32(rest)
    return used


def _functions(sources_digest: int) -> tuple[Any, Any]:
    """Make the functions; the digest is part of numba's cache key, which covers one file only."""

    def decode_rows(words, num_words, classes, slots, states, found, count):
        """Fill ``found``; return the number of words used, or -1 if there are too few."""
        used, pointer = np.int64(0), np.empty(1, np.int64)
        pointer[0] = address_of(words)
        for row in range(len(classes)):
            if VECTORS:
                place = (address_of(slots[classes[row]]), address_of(found[row]), np.int64(count))
                _decoded_row(sources_digest, (address_of(states), address_of(pointer), *place))
                used = (pointer[0] - address_of(words)) // 2
            else:
                used = _decode_row(words, used, slots[classes[row]], states, found[row], count)
            if used > num_words:
                return -1
        return used

    def encode_rows(symbols, classes, coding, states, words, count):
        """Put words, the last one first, and the final states; return the number of words."""
        used, pointer = np.int64(0), np.empty(1, np.int64)
        pointer[0] = address_of(words)
        for row in range(len(classes) - 1, -1, -1):
            if VECTORS:
                table, source = address_of(coding[classes[row]]), address_of(symbols[row])
                place = (address_of(pointer), table, source, np.int64(count))
                _coded_row(sources_digest, (address_of(states), *place))
                used = (pointer[0] - address_of(words)) // 2
            else:
                used = _code_row(symbols[row], coding[classes[row]], states, words, used, count)
        return used

    return decode_rows, encode_rows


_decode, _encode = _functions(SOURCES)
decode = compiled("i8", _decode, "u2:1 i8 i8:1 u4:2 u4:1 u1:2 i8")
encode = compiled("i8", _encode, "u1:2 i8:1 u4:2 u4:1 u2:1 i8")
