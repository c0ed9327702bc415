"""Emits the tiles of codecs in a closed loop; see ``one_step.closed_loop``.

A tile is ``TOKENS`` tokens by ``COLUMNS`` channels or components. Factors of its tokens lie in
*groups* of 32 bits: [group][token], tile by tile. Sums are int32 [token][channel].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit import dots
from kvstore.codecs.kernels.emit.emitter import I8, I16, I32, I64, Emitter, Value, in_turn
from kvstore.codecs.one_step.closed_loop import BYTE, LARGEST_LEVEL, ROUNDING

HOST = dots.host_vectors()
GROUP, LANES, OFFSET = HOST.group, HOST.lanes, HOST.offset
TOKENS, VECTORS, COLUMNS = HOST.tile_tokens, HOST.tile_vectors, HOST.tile_columns
PAIR = 2  # words in a group
ROW = 32  # bytes of a row that are grouped at once
# Constants of a component: rate, levels of a step, ones that are added to the first, second and
# further steps, largest symbol, and number of low bits.
RATE, PER_STEP, FIRST, SECOND, THIRD, LARGEST, LOW_BITS = range(7)
CONSTANTS = 7
STEPS = (ir.Constant(I64, 4 * TOKENS), ir.Constant(I64, 4 * COLUMNS))  # from group to group


def _tile(b: Any) -> dots.Tile:
    return dots.Tile(Emitter(b, LANES), TOKENS, VECTORS)


def emit_expected(b: Any, args: tuple[Value, ...]) -> None:
    """Emit the sums to which the units before lead.

    ``args``: address of the first known groups and their number, then of the second; addresses of
    their columns, of the columns' shifts, of the sums' initial values and of the result; bytes from
    one token's results to the next's.
    """
    first, num_first, second, num_second, matrix, up, begin, target, step = args
    tile = _tile(b)
    tile.begin(begin)
    tile.add(dots.dot_of_levels, first, matrix, num_first, *STEPS)
    used = b.mul(num_first, ir.Constant(I64, 4 * COLUMNS))
    tile.add(dots.dot_of_levels, second, b.add(matrix, used), num_second, *STEPS)
    for k in range(VECTORS):
        by = tile.e.load(up, 4 * LANES * k, tile.e.words)
        tile.change(k, lambda sums, by=by: b.shl(sums, by))
    tile.store(target, step)


def emit_components(b: Any, args: tuple[Value, ...]) -> None:
    """Emit sums of words: addresses of pairs and columns, number, address of the result, step."""
    source, matrix, count, target, step = args
    tile = _tile(b)
    for k in range(VECTORS):
        tile.change(k, lambda sums: tile.e.all_words(0))
    tile.add(dots.dot_of_words, source, matrix, count, *STEPS)
    tile.store(target, step)


def emit_restored(b: Any, args: tuple[Value, ...]) -> None:
    """Emit the products of a unit's own levels, added to the expected sums in place.

    ``args``: addresses of pairs of wide levels and of their columns, their number; the same of
    groups of the others; bits by which sums of wide ones are finer, i32; address of values added to
    the others' sums; address of the sums and bytes from one token's to the next's.
    """
    pairs, wide, num_pairs, groups, own, num_groups, finer, begin, target, step = args
    tile = _tile(b)
    e, one = tile.e, ir.Constant(I32, 1)
    half, by = e.splat_word(b.lshr(b.shl(one, finer), one)), e.splat_word(finer)
    tile.load(target, step)
    for k in range(VECTORS):
        tile.change(k, lambda sums: b.add(b.shl(sums, by), half))
    tile.add(dots.dot_of_words, pairs, wide, num_pairs, *STEPS)
    for k in range(VECTORS):
        more = e.load(begin, 4 * LANES * k, e.words)
        tile.change(k, lambda sums, more=more: b.add(b.ashr(sums, by), more))
    tile.add(dots.dot_of_levels, groups, own, num_groups, *STEPS)
    tile.store(target, step)


def emit_bytes(b: Any, args: tuple[Value, ...]) -> None:
    """Emit the conversion of a tile's sums to bytes in groups, for later units.

    ``args``: address of the sums and bytes from one token's to the next's; addresses of the
    columns' shifts to bytes, of those by which the sums are shifted in place, and of the groups;
    number of vectors of columns.
    """
    sums, step, down, left, target, count = args
    e = Emitter(b, LANES)
    with cgutils.for_range(b, count) as loop:
        at = b.mul(loop.index, ir.Constant(I64, 4 * LANES))
        out = b.add(target, b.mul(loop.index, ir.Constant(I64, 4 * TOKENS * LANES // GROUP)))
        shift, more = (e.load(b.add(x, at), 0, e.words) for x in (down, left))
        row = b.add(sums, at)
        for token in range(TOKENS):
            found = e.load(row, 0, e.words)
            e.store(b.shl(found, more), row, 0)
            rounded = b.ashr(b.add(found, _half(e, shift)), shift)
            _store_groups(e, GROUP, _clipped(e, rounded, BYTE), out, token)
            row = b.add(row, step)


def emit_residuals(b: Any, args: tuple[Value, ...]) -> None:
    """Emit a tile's residuals as words, in pairs.

    ``args``: address of the rows (fp32), bytes from one to the next; address of one over channels'
    units; address of the expected sums and bytes from one token's to the next's; address of the
    channels' shifts; largest residual, i32; address of the pairs; number of vectors of columns.
    """
    rows, rows_step, channels, sums, step, rest, limit, target, count = args
    e = Emitter(b, LANES)
    most = e.splat_word(limit)
    least = b.sub(e.all_words(0), most)
    with cgutils.for_range(b, count) as loop:
        at = b.mul(loop.index, ir.Constant(I64, 4 * LANES))
        out = b.add(target, b.mul(loop.index, ir.Constant(I64, 4 * TOKENS * LANES // PAIR)))
        shift = e.load(b.add(rest, at), 0, e.words)
        scale = e.load(b.add(channels, at), 0, e.floats)
        source, expected = b.add(rows, at), b.add(sums, at)
        for token in range(TOKENS):
            scaled = e.nearest(b.fmul(e.load(source, 0, e.floats), scale))
            residual = b.sub(b.fptosi(scaled, e.words), e.load(expected, 0, e.words))
            residual = b.ashr(b.add(residual, _half(e, shift)), shift)
            residual = b.select(b.icmp_signed("<", residual, least), least, residual)
            residual = b.select(b.icmp_signed(">", residual, most), most, residual)
            _store_groups(e, PAIR, residual, out, token)
            source, expected = b.add(source, rows_step), b.add(expected, step)


def emit_codes(b: Any, is_wide: int, args: tuple[Value, ...]) -> None:
    """Emit the codes of a tile's components, and their symbols, low bits and levels.

    ``args``: address of the sums and bytes from one token's to the next's; address of the
    ``CONSTANTS`` and bytes from one to the next; addresses of the levels' groups, of the first
    component's symbols and of its low bits; bytes from one component's to the next's; address of
    the codes, stepped like the sums; address of an i32 that is set to nonzero if a code is escaped;
    number of vectors of components.
    """
    sums, step, table, table_step, levels, symbols, low, row_step, codes, flag, count = args
    e = Emitter(b, LANES)
    zero, one, two = (e.all_words(k) for k in range(3))
    group = PAIR if is_wide else GROUP
    any_escaped = e.variable(e.words)
    b.store(zero, any_escaped)
    with cgutils.for_range(b, count) as loop:
        at = b.mul(loop.index, ir.Constant(I64, 4 * LANES))
        known, place = [], b.add(table, at)
        for _ in range(CONSTANTS):
            known.append(e.load(place, 0, e.words))
            place = b.add(place, table_step)
        rate, (per_step, *added, largest, low_bits) = e.as_floats(known[0]), known[1:]
        escape = b.add(b.shl(largest, one), one)
        mask = b.sub(b.shl(one, low_bits), one)
        out = b.add(levels, b.mul(loop.index, ir.Constant(I64, 4 * TOKENS * LANES // group)))
        row, code_row = b.add(sums, at), b.add(codes, at)
        found: list[Value] = []
        lowest: list[Value] = []
        for token in range(TOKENS):
            value = b.fmul(b.sitofp(e.load(row, 0, e.words), e.floats), rate)
            size = b.fadd(e.magnitude(value), e.all_floats(ROUNDING))
            size = e.call(f"llvm.floor.v{LANES}f32", e.floats, size)
            top = e.all_floats(LARGEST_LEVEL)
            size = b.fptosi(b.select(b.fcmp_ordered(">", size, top), top, size), e.words)
            more = b.select(b.icmp_signed(">", size, two), added[2], added[1])
            more = b.select(b.icmp_signed(">", size, one), more, added[0])
            more = b.select(b.icmp_signed(">", size, zero), more, zero)
            most = e.all_words(LARGEST_LEVEL if is_wide else BYTE)
            level = b.add(b.mul(size, per_step), more)
            level = b.select(b.icmp_signed(">", level, most), most, level)
            negative = b.icmp_signed("<", e.as_words(value), zero)
            code = b.select(negative, b.sub(zero, size), size)
            _store_groups(e, group, b.select(negative, b.sub(zero, level), level), out, token)
            e.store(code, code_row, 0)
            high = b.ashr(code, low_bits)
            past = b.icmp_signed(">", b.select(negative, b.sub(zero, high), high), largest)
            b.store(b.or_(b.load(any_escaped), b.sext(past, e.words)), any_escaped)
            found.append(b.select(past, escape, b.add(high, largest)))
            lowest.append(b.and_(code, mask))
            row, code_row = b.add(row, step), b.add(code_row, step)
        rows = b.mul(b.mul(loop.index, ir.Constant(I64, LANES)), row_step)
        _store_transposed(e, found, b.add(symbols, rows), row_step)
        if is_wide:
            _store_transposed(e, lowest, b.add(low, rows), row_step)
    total = b.load(any_escaped)
    lanes = [b.extract_element(total, ir.Constant(I32, k)) for k in range(LANES)]
    while len(lanes) > 1:
        lanes = [b.or_(x, y) for x, y in zip(lanes[::2], lanes[1::2], strict=True)]
    e.store(lanes[0], flag, 0)


def emit_grouped(b: Any, args: tuple[Value, ...]) -> None:
    """Emit code that joins ``GROUP`` rows of bytes into groups, tile by tile.

    ``args``: the addresses of the rows, of the groups, bytes from one tile to the next, number of
    stretches of ``ROW`` tokens.
    """
    *sources, target, tile_step, count = args
    e = Emitter(b, LANES)
    with cgutils.for_range(b, count) as loop:
        at = b.mul(loop.index, ir.Constant(I64, ROW))
        rows = [e.load(b.add(x, at), 0, ir.VectorType(I8, ROW)) for x in sources]
        if GROUP == PAIR:
            rows = [b.sext(row, ir.VectorType(I16, ROW)) for row in rows]
        out = b.add(target, b.mul(b.mul(loop.index, ir.Constant(I64, ROW // TOKENS)), tile_step))
        for groups in (b.bitcast(x, ir.VectorType(I32, ROW // GROUP)) for x in e.transposed(rows)):
            for first in range(0, ROW // GROUP, TOKENS):
                chosen = in_turn(ir.VectorType(I32, TOKENS), *range(first, first + TOKENS))
                e.store(b.shuffle_vector(groups, groups, chosen), out, 0)
                out = b.add(out, tile_step)


def _half(e: Emitter, shift: Value) -> Value:
    b = e.builder
    return b.lshr(b.shl(e.all_words(1), shift), e.all_words(1))


def _clipped(e: Emitter, words: Value, limit: int) -> Value:
    b, most, least = e.builder, e.all_words(limit), e.all_words(-limit & 0xFFFFFFFF)
    words = b.select(b.icmp_signed("<", words, least), least, words)
    return b.select(b.icmp_signed(">", words, most), most, words)


def _store_groups(e: Emitter, group: int, words: Value, target: Value, token: int) -> None:
    """Store one token's factors of ``LANES`` neighbours as groups: bytes plus offset, or words."""
    b = e.builder
    narrow = b.trunc(words, ir.VectorType(I8 if group == 4 else I16, LANES))
    if group == 4 and OFFSET:
        narrow = b.xor(narrow, in_turn(narrow.type, OFFSET))
    for k, value in enumerate(_integers(e, narrow, 32)):
        e.store(value, target, 4 * TOKENS * k + 4 * token)


def _store_transposed(e: Emitter, tokens: Sequence[Value], target: Value, step: Value) -> None:
    """Store words, one vector of components for each token, as rows of bytes, one a component."""
    rows = [e.builder.trunc(x, ir.VectorType(I8, LANES)) for x in tokens]
    for vector in e.transposed(rows):
        for value in _integers(e, vector, 8 * TOKENS):
            e.store(value, target, 0)
            target = e.builder.add(target, step)


def _integers(e: Emitter, vector: Value, width: int) -> list[Value]:
    """Cut a vector into integers of so many bits."""
    b, kind = e.builder, ir.IntType(width)
    count = vector.type.count * vector.type.element.width // width
    if count == 1:
        return [b.bitcast(vector, kind)]
    cut = b.bitcast(vector, ir.VectorType(kind, count))
    return [b.extract_element(cut, ir.Constant(I32, k)) for k in range(count)]
