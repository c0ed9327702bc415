"""Unpacks integer codes to rows in one pass, in numba; see ``stages.integer_klt``.

64 tokens of a unit at a time stay in the first-level cache: planes become levels, levels become
groups, groups are multiplied by the unit's matrix, and sums become rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore.codecs.kernels.units.kernel_parts import (
    BLOCK,
    GROUP,
    HOST,
    ROPE_TABLES,
    SEGMENTS,
    count_of,
    put_groups,
    put_levels,
    put_tile,
    tile_of_levels,
)
from kvstore.codecs.kernels.units.kernel_parts import OFFSET as OFFSET
from kvstore.codecs.loops.numba_functions import (
    LINE,
    NBYTES,
    address_of,
    compiled,
    first_line_of,
    sources_of,
    tuple_of,
)
from kvstore.codecs.loops.numba_functions import places_of as places_of
from kvstore.codecs.stages.gain import CODES
from kvstore.codecs.stages.integer_klt import MAX_BITS

SOURCES = sources_of(__file__)

TILE_TOKENS, TILE_COLUMNS = HOST.tile_tokens, HOST.tile_columns


@njit
def _levels_of_block(source, step, runs, table, width, rows):
    """Turn planes into levels.

    ``runs``: int64 (MAX_BITS + 1,), the number of components that have each number of bits; those
    with most bits come first in memory.
    """
    for bits in range(MAX_BITS, 0, -1):
        put_levels(SOURCES, (bits, source, step, table, width, rows, runs[bits]))
        source += runs[bits] * bits * step
        table += runs[bits] * width
        rows += runs[bits] * BLOCK


@njit
def _put_tail(planes, first, num_planes, start, nbytes, tail):
    """Copy planes from byte ``start`` on into words of eight bytes.

    Reading eight bytes at once from the last plane would pass its end.
    """
    for k in range(num_planes):
        for i in range(nbytes - start):
            tail[k, i] = planes[(first + k) * nbytes + start + i]


def _unpack_function(sources_digest: int) -> Any:
    """Make the function; the digest is part of numba's cache key, which covers one file only."""

    def unpack_units(planes, num_tokens, units, pairs, ropes, targets, scratch):
        """Unpack rows into ``targets``.

        ``planes``: uint8 (bytes,). ``units``: runs, levels, matrix, begins, means, gains, see
        ``fused_rate._tables``. ``pairs``: uint8 (units, pairs of tokens). ``ropes``:
        ``ROPE_TABLES`` and whether rows are fp32. ``scratch``: room for a block's rows, groups and
        sums, in bytes; for the last planes of one, and for its gains.
        """
        runs, levels, matrix, begins, means, gain_tables = units
        num_segments, dim = targets[0].shape[1], ropes[4]
        plane_nbytes, width = (num_tokens + 7) // 8, begins.shape[1]
        lines, tail, gains = scratch
        rows, groups = first_line_of(lines[0]), first_line_of(lines[1])
        sums = first_line_of(lines[2])
        plane = 0
        for unit in range(len(runs)):
            num_planes, num_components = count_of(runs[unit])
            num_groups = (num_components + GROUP - 1) // GROUP
            table, factors = address_of(levels[unit]), address_of(matrix[unit])
            begin, mean = address_of(begins[unit]), address_of(means[unit])
            for block in range(0, num_tokens, BLOCK):
                count, start = min(num_tokens - block, BLOCK), block // 8
                source = address_of(planes) + plane * plane_nbytes + start
                step = np.int64(plane_nbytes)
                # The other bytes of a short block's words belong to the next plane: no token's.
                beyond = (plane + num_planes - 1) * plane_nbytes + start + 8 > len(planes)
                if beyond:
                    _put_tail(planes, plane, num_planes, start, plane_nbytes, tail)
                    source, step = address_of(tail), np.int64(8)
                for token in range(count):
                    pair = pairs[unit, (block + token) // 2]
                    gains[token] = gain_tables[unit, (pair >> (4 * (token % 2))) & (CODES - 1)]
                _levels_of_block(source, step, runs[unit], table, levels.shape[2], rows)
                put_groups(sources_digest, (rows, groups, num_groups))
                for first in range(0, count, TILE_TOKENS):
                    for column in range(0, width, TILE_COLUMNS):
                        at = NBYTES * column
                        place = (groups + NBYTES * first, factors + at, begin + at, sums + at)
                        steps = (NBYTES * BLOCK, NBYTES * width, NBYTES * width)
                        tile_of_levels(SOURCES, (*place, num_groups, *steps))
                    token, rest = block + first, min(TILE_TOKENS, count - first)
                    gain_at = address_of(gains) + NBYTES * first
                    for segment in range(num_segments):
                        place, column = (unit, segment, token, rest), NBYTES * segment * dim
                        total, mean_at = sums + column, mean + column
                        put_tile(total, width, mean_at, gain_at, place, ropes, targets)
            plane += num_planes

    return unpack_units


unpack = compiled(
    "void",
    _unpack_function(SOURCES),
    "u1:1r i8",
    tuple_of("i8:2 u1:3 u4:3 i4:2 f4:2 f4:2"),
    "u1:2r",
    tuple_of(*ROPE_TABLES, "b1"),
    SEGMENTS,
    tuple_of("u1:2 u1:2 f4:1"),
)


def scratch_of(width: int, num_components: int) -> tuple[Any, ...]:
    """Return the room that ``unpack`` needs for units of so many columns and components."""
    return (
        np.zeros((3, LINE + NBYTES * BLOCK * max(width, num_components)), np.uint8),
        np.zeros((MAX_BITS * num_components, 8), np.uint8),
        np.empty(BLOCK, np.float32),
    )
