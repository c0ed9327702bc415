"""Restores rows in one pass from decoded levels, in numba; see ``one_step.closed_loop``.

Unit by unit: levels of all tokens become groups, which stay in the second-level cache. Then tile by
tile: the prediction, the unit's own levels, bytes for later units, and rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore.codecs.kernels.emit.loop_tiles import CONSTANTS as CONSTANTS
from kvstore.codecs.kernels.emit.loop_tiles import (
    FIRST,
    LARGEST,
    LOW_BITS,
    PER_STEP,
    ROW,
    SECOND,
    THIRD,
)
from kvstore.codecs.kernels.units.kernel_parts import GROUP, ROPE_TABLES, SEGMENTS, put_tile
from kvstore.codecs.kernels.units.kernel_parts import LANES as LANES
from kvstore.codecs.kernels.units.kernel_parts import OFFSET as OFFSET
from kvstore.codecs.kernels.units.loop_parts import COLUMNS as COLUMNS
from kvstore.codecs.kernels.units.loop_parts import (
    RING,
    TABLES,
    TOKENS,
    add_excess,
    expect,
    grouped_rows,
    keep_bytes,
    restore,
    ring_of,
)
from kvstore.codecs.loops.numba_functions import (
    NBYTES,
    address_of,
    compiled,
    sources_of,
    tuple_of,
)
from kvstore.codecs.loops.numba_functions import places_of as places_of
from kvstore.codecs.one_step.closed_loop import LARGEST_CODE, LARGEST_LEVEL, RestoringTables

SOURCES = sources_of(__file__)


@njit
def _put_wide(symbols, low, known, rare, used, levels):
    """Put the levels of one wide component, int32 (tokens,), into ``levels``.

    ``symbols``, ``low``: uint8 (tokens,); ``known``: int32 (CONSTANTS,). Returns the number of
    ``rare`` codes used so far.
    """
    per_step, largest, low_bits = known[PER_STEP], known[LARGEST], known[LOW_BITS]
    first, second, third = known[FIRST], known[SECOND], known[THIRD]
    escapes = 0
    for token in range(len(levels)):
        levels[token] = np.int32(symbols[token]) - largest
        escapes += levels[token] > largest
    if escapes:
        for token in range(len(levels)):
            if levels[token] > largest:
                levels[token] = rare[used]
                used += 1
    if low_bits:
        for token in range(len(levels)):
            levels[token] = np.int32((levels[token] << low_bits) + low[token])
    for token in range(len(levels)):
        code = min(max(levels[token], np.int32(-LARGEST_CODE)), np.int32(LARGEST_CODE))
        size = np.int32(abs(code))
        added = third if size > 2 else (second if size > 1 else (first if size else np.int32(0)))
        level = min(np.int32(np.int32(size * per_step) + added), np.int32(LARGEST_LEVEL))
        levels[token] = -level if code < 0 else level
    return used


@njit
def _pair_up(levels, component, pairs, words):
    """Put levels into ``words``, int16, in groups of two components, tile by tile."""
    group, lane = component // 2, component % 2
    for token in range(len(levels)):
        tile, within = token // TOKENS, token % TOKENS
        words[((tile * pairs + group) * TOKENS + within) * 2 + lane] = np.int16(levels[token])


@njit
def _group_up(symbols, first, count, groups):
    """Join rows of bytes into groups; rows beyond the last are multiplied by zeros."""
    num, step = (count + GROUP - 1) // GROUP, symbols.shape[1]
    base, last = address_of(symbols) + first * step, count - 1
    for group in range(num):
        row, target = GROUP * group, address_of(groups) + NBYTES * TOKENS * group
        place = (target, NBYTES * TOKENS * num, np.int64(step // ROW))
        one = (base + step * row, base + step * min(row + 1, last))
        if GROUP == 2:
            grouped_rows(SOURCES, (*one, *place))
        else:
            two = (base + step * min(row + 2, last), base + step * min(row + 3, last))
            grouped_rows(SOURCES, (*one, *two, *place))


def _unpack_function(sources_digest: int) -> Any:
    """Make the function; the digest is part of numba's cache key, which covers one file only."""

    def unpack_units(coded, excess, tables, units, gains, ropes, targets, scratch):
        """Unpack rows into ``targets``.

        ``coded``: levels of components, uint8 (components, padded tokens), but symbols of wide
        ones; low bits of those that have some; rare codes of wide ones. ``excess``: see
        ``add_excess``. ``tables``, ``units``: ``LoopTables`` and ``RestoringTables`` of
        ``one_step.closed_loop``. ``gains``: fp32 (units, parts, tokens), times the unit.
        ``ropes``: ``ROPE_TABLES`` and whether rows are fp32. ``scratch``: room for the last units,
        for factors of wide components and of others, for sums of a tile, and for one component.
        """
        symbols, low, rare = coded
        left, means, part_of = units
        counts, constants = tables.counts, tables.constants
        dim, segments = ropes[4], targets[0].shape[1]
        width, num_tokens = segments * dim, gains.shape[2]
        own = np.int64(width // GROUP)
        ring, words, groups, sums, levels = scratch
        row, low_row, used, at = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for unit in range(len(counts)):
            wide, others = counts[unit, 0], counts[unit, 1]
            pairs, num_groups = (wide + 1) // 2, (others + GROUP - 1) // GROUP
            if wide % 2:
                levels[:] = 0
                _pair_up(levels, wide, pairs, words)
            for component in range(wide):
                known = constants[unit, :, component]
                has_low = known[LOW_BITS] > 0
                bits = low[low_row if has_low else 0]
                used = _put_wide(symbols[row], bits, known, rare, used, levels)
                _pair_up(levels, component, pairs, words)
                row, low_row = row + 1, low_row + has_low
            if others:
                _group_up(symbols, row, others, groups)
            row += others
            for tile in range((num_tokens + TOKENS - 1) // TOKENS):
                first = tile * TOKENS
                count = min(num_tokens - first, TOKENS)
                expect(tables, unit, tile, ring, own, sums)
                pairs_at = address_of(words) + NBYTES * TOKENS * pairs * tile
                groups_at = address_of(groups) + NBYTES * TOKENS * num_groups * tile
                restore(tables, unit, pairs_at, groups_at, sums)
                at = add_excess(tables, excess, at, unit, first, width, sums)
                keep_bytes(tables, unit, tile, ring, own, address_of(left[unit]), sums)
                for segment in range(segments):
                    column = NBYTES * segment * dim
                    gain = address_of(gains[unit, part_of[segment]]) + NBYTES * first
                    place = (unit, segment, first, count)
                    mean = address_of(means[unit]) + column
                    total = address_of(sums) + column
                    put_tile(total, sums.shape[1], mean, gain, place, ropes, targets)
        return sources_digest

    return unpack_units


unpack = compiled(
    "i8",
    _unpack_function(SOURCES),
    tuple_of("u1:2 u1:2 i4:1"),
    "i4:2",
    TABLES,
    tuple_of("i4:2 f4:2 i8:1", names=RestoringTables),
    "f4:3",
    tuple_of(*ROPE_TABLES, "b1"),
    SEGMENTS,
    tuple_of(RING, "i2:1 u4:1 i4:2 i4:1"),
)


def scratch_of(num_tokens: int, padded_tokens: int, tables: Any, width: int) -> tuple[Any, ...]:
    """Return the room that ``unpack`` needs for such tokens, and rows of ``width``."""
    num_tiles = padded_tokens // TOKENS
    return (
        ring_of(tables, width, num_tiles),
        np.zeros(num_tiles * tables.wide.shape[2] * TOKENS * 2 + 1, np.int16),
        np.empty(num_tiles * tables.own.shape[2] * TOKENS + 1, np.uint32),
        np.empty((TOKENS, tables.begins.shape[2]), np.int32),
        np.empty(num_tokens, np.int32),
    )
