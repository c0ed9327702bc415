"""Turns rows into symbols in one pass, in numba; undone by ``unpack_loop``.

Unit by unit and tile by tile: what the units before lead to expect is subtracted, the residual is
turned into components and quantised, and the rows are restored as a reader will have them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kvstore.codecs.kernels.emit.emitter import log2
from kvstore.codecs.kernels.emit.loop_tiles import FIRST, LARGEST, LOW_BITS, PER_STEP, SECOND, THIRD
from kvstore.codecs.kernels.units.kernel_parts import (
    GROUP,
    LANES,
    ROPE_TABLES,
    SEGMENTS,
    put_squares,
)
from kvstore.codecs.kernels.units.loop_parts import (
    COLUMNS,
    RING,
    TABLES,
    TOKENS,
    add_excess,
    codes_of_sums,
    components_tile,
    expect,
    keep_bytes,
    residuals_of_rows,
    restore,
    ring_of,
)
from kvstore.codecs.kernels.units.pack_fixed_rate import load_block, steps_of
from kvstore.codecs.loops.numba_functions import (
    NBYTES,
    address_of,
    compiled,
    sources_of,
    tuple_of,
)
from kvstore.codecs.one_step.closed_loop import BYTE, LARGEST_LEVEL, PackingTables
from kvstore.codecs.stages.gain import (
    COARSE,
    FINER,
    FURTHEST,
    INFINITY,
    MANTISSA_BITS,
    REACH,
    STEP_BITS,
)

SOURCES = sources_of(__file__)

COARSE_BITS, FINER_BITS = log2(COARSE), log2(FINER)


@njit
def _components(encode, pairs, live, sums):
    """Put the components of a tile into ``sums``, int32 (TOKENS, components)."""
    step = np.int64(NBYTES * sums.shape[1])
    for panel in range((live + COLUMNS - 1) // COLUMNS):
        target = address_of(sums) + NBYTES * COLUMNS * panel
        num = np.int64(encode.shape[1])
        args = (address_of(pairs), address_of(encode[panel]), num, target, step)
        components_tile(SOURCES, args)


@njit
def _scale(scratch, count, unit, sizes, first):
    """Divide the rows of a tile by their gains; False if one has none.

    ``sizes``: first columns and numbers of columns of gain groups, factors of sums of squares,
    centres, and gains to fill, followed by their bits. ``first``: the tile's first token.
    """
    parts, shares, centres, gains, gain_bits = sizes
    rows, squares, bits = scratch.rows, scratch.squares, scratch.square_bits
    steps = scratch.steps
    step_bytes = np.int64(NBYTES * rows.shape[1])
    for part in range(len(parts)):
        start, columns = parts[part, 0], parts[part, 1]
        source = address_of(rows) + NBYTES * start
        put_squares(SOURCES, (source, step_bytes, columns, address_of(squares), np.int64(TOKENS)))
        for token in range(TOKENS):
            squares[token] = np.sqrt(squares[token] * shares[part])
        steps_of(bits, steps)
        centre = centres[unit, part]
        for token in range(count):
            step = np.int32((steps[token] + FINER // 2) >> np.int32(FINER_BITS)) - centre
            # Unsigned: a NaN may have its sign set.
            if np.uint32(bits[token]) >= INFINITY or step > REACH:
                return False
            whole = min(max(max(step, -REACH) + centre, -FURTHEST), FURTHEST)
            octave = whole >> COARSE_BITS
            found = STEP_BITS[(whole - (octave << COARSE_BITS)) * FINER] + (octave << MANTISSA_BITS)
            gain_bits[unit, part, first + token] = found
            factor = np.float32(1) / gains[unit, part, first + token]
            for column in range(start, start + columns):
                rows[token, column] *= factor
    return True


@njit
def _note_rare(codes, known, place, count, found):
    """Note escaped codes of a tile, and the excess of levels over a byte, which only they can have.

    ``codes``: int32 (TOKENS, components); ``known``: int32 (CONSTANTS, components). ``place``: the
    number of the first component's row, whether components are wide, unit, first token, end of the
    tokens. ``found``: keys and codes of rare ones, excess, and how many there are of both.
    """
    keys, rare, excess, used = found
    row, is_wide, unit, first, end = place
    for within in range(min(TOKENS, end - first)):
        for k in range(count):
            code = codes[within, k]
            high = code >> known[LOW_BITS, k]
            if abs(high) <= known[LARGEST, k]:
                continue
            keys[used[0]], rare[used[0]] = (row + k) * end + first + within, high
            used[0] += 1
            size = abs(code)
            added = known[THIRD if size > 2 else (SECOND if size > 1 else FIRST), k]
            level = min(size * known[PER_STEP, k] + added, LARGEST_LEVEL)
            if not is_wide and level > BYTE:
                more = level - BYTE if code > 0 else BYTE - level
                excess[used[1], 0], excess[used[1], 1] = unit, first + within
                excess[used[1], 2], excess[used[1], 3] = k, more
                used[1] += 1


class TileScratch(NamedTuple):
    """Holds room for intermediate results of one tile, and for the bytes of the units before.

    Attributes:
        ring: from ``ring_of``.
        rows: fp32 (TOKENS, width).
        squares: fp32 (TOKENS,), sums of squares, then sizes; ``square_bits``: the same as int32.
        steps: int32 (TOKENS,), of the sizes.
        sums: int32 (TOKENS, padded width), the expected rows, then the restored ones.
        pairs: uint32, words of residuals, two channels each.
        components, codes: int32 (TOKENS, components).
        words, levels: uint32, groups of wide levels and of others, whole vectors of components.
        excess: int32 (entries, 4), see ``add_excess``; at most one for each component and token.
        no_shifts: zeros, int32 (padded width,).
        flag: int32 (1,), whether a code is escaped.
        used: int64 (2,), the numbers of rare codes, and of entries of ``excess``.
    """

    ring: Any
    rows: Any
    squares: Any
    square_bits: Any
    steps: Any
    sums: Any
    pairs: Any
    components: Any
    codes: Any
    words: Any
    levels: Any
    excess: Any
    no_shifts: Any
    flag: Any
    used: Any


SCRATCH = tuple_of(
    RING, "f4:2 f4:1 i4:1 i4:1 i4:2 u4:1 i4:2 i4:2 u4:1 u4:1 i4:2 i4:1 i4:1 i8:1", names=TileScratch
)


def scratch_of(num_tokens: int, tables: Any, width: int) -> TileScratch:
    """Make the room that ``pack`` needs for so many tokens of units of ``width``."""
    padded, room = tables.begins.shape[2], tables.constants.shape[2]
    squares = np.empty(TOKENS, np.float32)
    return TileScratch(
        ring=ring_of(tables, width, -(-num_tokens // TOKENS)),
        rows=np.zeros((TOKENS, width), np.float32),
        squares=squares,
        square_bits=squares.view(np.int32),
        steps=np.empty(TOKENS, np.int32),
        sums=np.empty((TOKENS, padded), np.int32),
        pairs=np.empty(width // 2 * TOKENS, np.uint32),
        components=np.empty((TOKENS, room), np.int32),
        codes=np.empty((TOKENS, room), np.int32),
        words=np.empty((room // 2 + LANES) * TOKENS, np.uint32),
        levels=np.empty((room // GROUP + LANES) * TOKENS, np.uint32),
        excess=np.empty((TOKENS * room, 4), np.int32),
        no_shifts=np.zeros(padded, np.int32),
        flag=np.zeros(1, np.int32),
        used=np.zeros(2, np.int64),
    )


def _pack_function(sources_digest: int) -> Any:
    """Make the function; the digest is part of numba's cache key, which covers one file only."""

    def pack_units(
        segments, num_tokens, tables, units, limit, sizes, ropes, symbols, found, scratch
    ):
        """Put gains and symbols of rows; return the number of rare codes, -1 if a row has no gain.

        ``segments``: the engine's rows. ``tables``, ``units``: the classes ``LoopTables`` and
        ``PackingTables``. ``limit``: the largest residual. ``sizes``: see ``_scale``. ``ropes``:
        ``ROPE_TABLES`` and whether rows are fp32. ``symbols``: symbols, and low bits of wide
        components; both uint8 (components and ``LANES`` more, padded tokens). ``found``: keys
        (component times tokens plus token) and rare codes, in no order.
        """
        counts, constants = tables.counts, tables.constants
        symbols, low = symbols
        keys, rare = found
        ring, rows, sums, pairs = scratch.ring, scratch.rows, scratch.sums, scratch.pairs
        words, levels = address_of(scratch.words), address_of(scratch.levels)
        components, codes = scratch.components, scratch.codes
        excess, flag, used = scratch.excess, scratch.flag, scratch.used
        width, padded, room = units.means.shape[1], tables.begins.shape[2], constants.shape[2]
        num_tiles, own = (num_tokens + TOKENS - 1) // TOKENS, np.int64(width // GROUP)
        row, low_row = np.int64(0), np.int64(0)
        for unit in range(len(counts)):
            wide, others = counts[unit, 0], counts[unit, 1]
            apart = (wide + LANES - 1) // LANES * LANES
            known, step = constants[unit], np.int64(NBYTES * room)
            for tile in range(num_tiles):
                first = tile * TOKENS
                here = min(num_tokens - first, TOKENS)
                mean, target = address_of(units.means[unit]), address_of(rows)
                if here < TOKENS:
                    rows[here:] = 0
                load_block(unit, first, here, mean, width, ropes, segments, target)
                if not _scale(scratch, here, unit, sizes, first):
                    return -1
                expect(tables, unit, tile, ring, own, sums)
                residual = (
                    address_of(rows),
                    np.int64(NBYTES * width),
                    address_of(units.channels[unit]),
                    address_of(sums),
                    np.int64(NBYTES * padded),
                    address_of(units.rest[unit]),
                    limit,
                    address_of(pairs),
                    np.int64(width // LANES),
                )
                residuals_of_rows(sources_digest, residual)
                _components(units.encode[unit], pairs, apart + others, components)
                used[1] = 0
                for is_wide in range(1, -1, -1):
                    start, count = (0, wide) if is_wide else (apart, others)
                    if not count:
                        continue
                    first_row = row if is_wide else row + wide
                    args = (
                        is_wide,
                        address_of(components) + NBYTES * start,
                        step,
                        address_of(known) + NBYTES * start,
                        step,
                        words if is_wide else levels,
                        address_of(symbols) + first_row * symbols.shape[1] + first,
                        address_of(low) + low_row * low.shape[1] + first,
                        np.int64(symbols.shape[1]),
                        address_of(codes) + NBYTES * start,
                        address_of(flag),
                        (count + LANES - 1) // LANES,
                    )
                    codes_of_sums(SOURCES, args)
                    if flag[0]:
                        place = (first_row, is_wide, unit, first, num_tokens)
                        lists = (keys, rare, excess, used)
                        _note_rare(codes[:, start:], known[:, start:], place, count, lists)
                restore(tables, unit, words, levels, sums)
                add_excess(tables, excess[: used[1]], 0, unit, first, width, sums)
                keep_bytes(tables, unit, tile, ring, own, address_of(scratch.no_shifts), sums)
            row, low_row = row + wide + others, low_row + wide
        return used[0]

    return pack_units


pack = compiled(
    "i8",
    _pack_function(SOURCES),
    SEGMENTS,
    "i8",
    TABLES,
    tuple_of("f4:2 f4:2 i4:2 u4:4", names=PackingTables),
    "i4",
    tuple_of("i8:2 f4:1 i4:2 f4:3 i4:3"),
    tuple_of(*ROPE_TABLES, "b1"),
    tuple_of("u1:2 u1:2"),
    tuple_of("i8:1 i4:1"),
    SCRATCH,
)
