"""Loads and stores rows in the engine's dtype; the counterpart of ``codecs.floats``.

A row in registers is *split* here: it consists of pairs of vectors, the first with the even and the
second with the odd elements of a stretch of the row. Two neighbouring 16-bit values share a 32-bit
word, so splitting costs a shift and a mask; widening in order would need shuffles. The signs of the
rotation are applied while loading and storing, two to a word.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from kvstore.codecs.kernels.emit.emitter import I16, BFloat, Emitter, Value, host_features
from kvstore.shapes import DType

REBIAS = 112  # between the exponents of fp16 and fp32
HIGH_HALF = 0xFFFF0000
# A bf16 is below ``rotated_rows.SMALLEST``, 2^-63, if its upper two exponent bits are zero.
UPPER_EXPONENT = 0x6000


def load_row(e: Emitter, dtype: DType, base: Value, signs: np.ndarray) -> list[Value]:
    """Load signs * row as split fp32 vectors; every value fits into 16 bits.

    ``signs``: uint32 (dim,), masks for the top bit.
    """
    load = {"bfloat16": _load_bf16, "float16": _load_fp16, "float32": _load_fp32}[dtype]
    masks = signs.reshape(-1, 2 * e.lanes)
    return [vector for i, mask in enumerate(masks) for vector in load(e, base, i, mask)]


def load_squares(e: Emitter, dtype: DType, base: Value, dim: int) -> list[Value]:
    """Load a row as sums of the squares of two neighbours; small values count as zero."""
    stretches = range(dim // (2 * e.lanes))
    if dtype != "bfloat16":
        row = [_cut(e, x) for x in load_row(e, dtype, base, np.zeros(dim, np.uint32))]
    elif _is_at_home_in_bf16(e, dtype):
        return [_squares_of_bf16(e, _bf16(e, base, i)) for i in stretches]
    else:
        row = [x for i in stretches for x in _split_bf16(e, _cut_bf16(e, _bf16(e, base, i)))]
    pairs = zip(row[::2], row[1::2], strict=True)
    return [e.multiply_add(a, a, e.builder.fmul(b, b)) for a, b in pairs]


def _is_at_home_in_bf16(e: Emitter, dtype: DType) -> bool:
    return dtype == "bfloat16" and e.lanes >= 4 and "avx512bf16" in host_features()


def _squares_of_bf16(e: Emitter, halves: Value) -> Value:
    """Add neighbours' squares; small values have denormal squares, which become zero here."""
    pairs = e.builder.bitcast(halves, ir.VectorType(BFloat(), 2 * e.lanes))
    zero = ir.Constant(e.floats, None)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * e.lanes}"
    return e.call(name, e.floats, zero, pairs, pairs)


def _joined_as_bf16(e: Emitter, first: Value, second: Value) -> Value:
    """Round two vectors to bf16, one after the other in one vector of halves."""
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * e.lanes}"
    halves = e.call(name, ir.VectorType(BFloat(), 2 * e.lanes), second, first)
    return e.builder.bitcast(halves, ir.VectorType(I16, 2 * e.lanes))


def store_row(e: Emitter, dtype: DType, base: Value, signs: np.ndarray, row: list[Value]) -> None:
    """Store signs * row, split vectors of finite values: the inverse of ``load_row``."""
    store = {"bfloat16": _store_bf16, "float16": _store_fp16, "float32": _store_fp32}[dtype]
    pairs = zip(row[::2], row[1::2], signs.reshape(-1, 2 * e.lanes), strict=True)
    for i, (even, odd, part) in enumerate(pairs):
        even, odd = e.flip(even, e.word_list(part[::2])), e.flip(odd, e.word_list(part[1::2]))
        store(e, base, i, even, odd)


def store_natural(
    e: Emitter, dtype: DType, base: Value, signs: np.ndarray, row: list[Value]
) -> None:
    """Store signs * row like ``store_row``, of vectors in natural order."""
    pairs = list(zip(row[::2], row[1::2], strict=True))
    if not _is_at_home_in_bf16(e, dtype):
        every = range(0, 2 * e.lanes, 2)
        halves = (every, range(1, 2 * e.lanes, 2))
        return store_row(
            e, dtype, base, signs, [e.choose(a, b, half) for a, b in pairs for half in halves]
        )
    flips = signs.reshape(-1, 2, e.lanes)
    for i, (pair, flip) in enumerate(zip(pairs, flips, strict=True)):
        low, high = (e.flip(x, e.word_list(part)) for x, part in zip(pair, flip, strict=True))
        e.store(_joined_as_bf16(e, low, high), base, 4 * e.lanes * i)


def _load_bf16(e: Emitter, base: Value, pair: int, signs: np.ndarray) -> tuple[Value, Value]:
    halves = _bf16(e, base, pair)
    flips = ir.Constant(halves.type, [ir.Constant(I16, int(mask) >> 16) for mask in signs])
    return _split_bf16(e, e.builder.xor(halves, flips))


def _bf16(e: Emitter, base: Value, pair: int) -> Value:
    return e.load(base, 4 * e.lanes * pair, ir.VectorType(I16, 2 * e.lanes))


def _cut_bf16(e: Emitter, values: Value) -> Value:
    zero = ir.Constant(values.type, None)
    upper = ir.Constant(values.type, [ir.Constant(I16, UPPER_EXPONENT)] * values.type.count)
    large = e.builder.icmp_unsigned("!=", e.builder.and_(values, upper), zero)
    return e.builder.select(large, values, zero)


def _split_bf16(e: Emitter, values: Value) -> tuple[Value, Value]:
    words = e.builder.bitcast(values, e.words)
    even = e.builder.shl(words, e.all_words(16))
    return e.as_floats(even), e.as_floats(e.builder.and_(words, e.all_words(HIGH_HALF)))


def _store_bf16(e: Emitter, base: Value, pair: int, even: Value, odd: Value) -> None:
    if _is_at_home_in_bf16(e, "bfloat16"):
        halves = _joined_as_bf16(e, even, odd)
        in_turn = [k // 2 + e.lanes * (k % 2) for k in range(2 * e.lanes)]
        interleaved = Emitter(e.builder, 2 * e.lanes).choose(halves, halves, in_turn)
        return e.store(interleaved, base, 4 * e.lanes * pair)
    low = e.builder.lshr(rounded(e, even), e.all_words(16))
    high = e.builder.and_(rounded(e, odd), e.all_words(HIGH_HALF))
    e.store(e.builder.or_(low, high), base, 4 * e.lanes * pair)


def _load_fp16(e: Emitter, base: Value, pair: int, signs: np.ndarray) -> tuple[Value, Value]:
    words = e.load(base, 4 * e.lanes * pair, e.words)
    halves = e.builder.and_(words, e.all_words(0xFFFF)), e.builder.lshr(words, e.all_words(16))
    even, odd = (widen_fp16(e, x) for x in halves)
    return e.flip(even, e.word_list(signs[::2])), e.flip(odd, e.word_list(signs[1::2]))


def _store_fp16(e: Emitter, base: Value, pair: int, even: Value, odd: Value) -> None:
    high = e.builder.shl(_narrow_to_fp16(e, odd), e.all_words(16))
    e.store(e.builder.or_(_narrow_to_fp16(e, even), high), base, 4 * e.lanes * pair)


def _load_fp32(e: Emitter, base: Value, pair: int, signs: np.ndarray) -> tuple[Value, Value]:
    at = 8 * e.lanes * pair
    low, high = (round_to_bf16(e, e.load(base, at + k * 4 * e.lanes, e.words)) for k in (0, 1))
    lanes = range(0, 2 * e.lanes, 2)
    even, odd = e.choose(low, high, lanes), e.choose(low, high, (k + 1 for k in lanes))
    return e.flip(even, e.word_list(signs[::2])), e.flip(odd, e.word_list(signs[1::2]))


def _store_fp32(e: Emitter, base: Value, pair: int, even: Value, odd: Value) -> None:
    values = [e.builder.and_(rounded(e, x), e.all_words(HIGH_HALF)) for x in (even, odd)]
    for k in range(2):
        first = k * e.lanes // 2
        lanes = [first + i // 2 + e.lanes * (i % 2) for i in range(e.lanes)]
        e.store(e.choose(values[0], values[1], lanes), base, 8 * e.lanes * pair + k * 4 * e.lanes)


def _cut(e: Emitter, floats: Value) -> Value:
    words = e.as_words(floats)
    upper = e.builder.and_(words, e.all_words(UPPER_EXPONENT << 16))
    large = e.builder.icmp_unsigned("!=", upper, e.all_words(0))
    return e.as_floats(e.builder.select(large, words, e.all_words(0)))


def rounded(e: Emitter, floats: Value) -> Value:
    """Round fp32 numbers to bf16, nearest even; the lower halves of the words are meaningless."""
    words = e.as_words(floats)
    odd = e.builder.and_(e.builder.lshr(words, e.all_words(16)), e.all_words(1))
    return e.builder.add(e.builder.add(words, e.all_words(0x7FFF)), odd)


def round_to_bf16(e: Emitter, words: Value) -> Value:
    """Round fp32 words to bf16, kept as fp32; a NaN stays as it is.

    Rounding a NaN could carry over into its sign and give minus zero.
    """
    floats = e.as_floats(words)
    is_nan = e.builder.fcmp_unordered("uno", floats, floats)
    narrow = e.builder.and_(rounded(e, floats), e.all_words(HIGH_HALF))
    return e.as_floats(e.builder.select(is_nan, words, narrow))


def widen_fp16(e: Emitter, words: Value) -> Value:
    """Widen fp16 to fp32 with integer operations, since not every host can convert.

    Infinity and NaN are kept.
    """
    b = e.builder
    size = b.and_(words, e.all_words(0x7FFF))
    sign = b.shl(b.and_(words, e.all_words(0x8000)), e.all_words(16))
    normal = b.add(b.shl(size, e.all_words(13)), e.all_words(REBIAS << 23))
    beyond = b.icmp_unsigned(">=", size, e.all_words(0x7C00))
    normal = b.select(beyond, b.add(normal, e.all_words(REBIAS << 23)), normal)
    tiny = b.fmul(b.uitofp(size, e.floats), e.all_floats(2.0**-24))
    is_tiny = b.icmp_unsigned("<", size, e.all_words(0x0400))
    return e.as_floats(b.or_(sign, b.select(is_tiny, e.as_words(tiny), normal)))


def _narrow_to_fp16(e: Emitter, floats: Value) -> Value:
    """Round fp32 to words whose lower half is fp16; large numbers saturate.

    Adding 0.5 rounds numbers that become denormal.
    """
    b = e.builder
    size, largest, half = e.magnitude(floats), e.all_floats(65504), e.all_floats(0.5)
    size = b.select(b.fcmp_ordered(">", size, largest), largest, size)
    words = e.as_words(size)
    odd = b.and_(b.lshr(words, e.all_words(13)), e.all_words(1))
    rounded = b.lshr(b.add(b.add(words, e.all_words(0xFFF)), odd), e.all_words(13))
    normal = b.sub(rounded, e.all_words(REBIAS << 10))
    tiny = b.sub(e.as_words(b.fadd(size, half)), e.as_words(half))
    is_tiny = b.fcmp_ordered("<", size, e.all_floats(2.0**-14))
    sign = b.and_(b.lshr(e.as_words(floats), e.all_words(16)), e.all_words(0x8000))
    return b.or_(sign, b.select(is_tiny, tiny, normal))
