"""Parts that packing and restoring in a closed loop share: intrinsics, tables, known units.

See ``one_step.closed_loop`` and ``emit.loop_tiles``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore.codecs.kernels.emit import loop_tiles
from kvstore.codecs.kernels.units.kernel_parts import GROUP, LANES, by_number, plain
from kvstore.codecs.loops.numba_functions import (
    NBYTES,
    address_of,
    sources_of,
    tuple_of,
)
from kvstore.codecs.one_step.closed_loop import LoopTables

SOURCES = sources_of(__file__)

TOKENS, COLUMNS = loop_tiles.TOKENS, loop_tiles.COLUMNS
_expected_tile: Any = plain(loop_tiles.emit_expected)
_restored_tile: Any = plain(loop_tiles.emit_restored)
_bytes_of_sums: Any = plain(loop_tiles.emit_bytes)
components_tile: Any = plain(loop_tiles.emit_components)
residuals_of_rows: Any = plain(loop_tiles.emit_residuals)
codes_of_sums: Any = by_number(loop_tiles.emit_codes, (0, 1))
grouped_rows: Any = plain(loop_tiles.emit_grouped)

TABLES = tuple_of("i8:2 u4:4 u4:4 u4:4 i4:3 i4:3 i4:1 i1:3r i4:3", names=LoopTables)
RING = tuple_of("u4:1 i8")  # of ``ring_of``


def ring_of(tables: Any, width: int, num_tiles: int) -> tuple[np.ndarray, int]:
    """Allocate the bytes of the last units, uint32, in groups; return the groups of a tile, too.

    Units follow one another, and begin again at the start: there is room for one more than any
    prediction goes back.
    """
    own = width // GROUP
    slots = -(-tables.known.shape[2] // own) + 1
    return np.empty(num_tiles * slots * own * TOKENS, np.uint32), slots * own


@njit
def expect(tables, unit, tile, ring, own, sums):
    """Put the sums to which the units before lead into ``sums``, int32 (TOKENS, padded width).

    ``ring``: from ``ring_of``. ``own``: groups of a unit.
    """
    known, begins, shifts = tables.known, tables.begins, tables.shifts
    groups, size = ring
    reach = np.int64(known.shape[2])
    num = min(unit * own, reach)
    end = unit * own % size
    first = (end - num) % size
    before = min(num, size - first)
    base = address_of(groups) + NBYTES * TOKENS * size * tile
    for panel in range(known.shape[1]):
        matrix = address_of(known[unit, panel]) + NBYTES * COLUMNS * (reach - num)
        args = (
            base + NBYTES * TOKENS * first,
            np.int64(before),
            base,
            np.int64(num - before),
            matrix,
            address_of(shifts[unit, 0]) + NBYTES * COLUMNS * panel,
            address_of(begins[unit, 0]) + NBYTES * COLUMNS * panel,
            address_of(sums) + NBYTES * COLUMNS * panel,
            np.int64(NBYTES * sums.shape[1]),
        )
        _expected_tile(SOURCES, args)


@njit
def restore(tables, unit, words, levels, sums):
    """Add a unit's own levels to the expected ``sums``.

    ``words``, ``levels``: the addresses of a tile's groups of wide levels and of others.
    """
    counts, wide, own, begins = tables.counts, tables.wide, tables.own, tables.begins
    for panel in range(own.shape[1]):
        args = (
            words,
            address_of(wide[unit, panel]),
            (counts[unit, 0] + 1) // 2,
            levels,
            address_of(own[unit, panel]),
            (counts[unit, 1] + GROUP - 1) // GROUP,
            tables.finer[unit],
            address_of(begins[unit, 1]) + NBYTES * COLUMNS * panel,
            address_of(sums) + NBYTES * COLUMNS * panel,
            np.int64(NBYTES * sums.shape[1]),
        )
        _restored_tile(SOURCES, args)


@njit
def add_excess(tables, excess, at, unit, first, width, sums):
    """Add what bytes of levels cannot hold to the sums of a tile; return the next entry.

    ``excess``: int32 (entries, 4): unit, token, component and excess, in this order. ``first``: the
    tile's first token.
    """
    rows = tables.rows
    while at < len(excess) and excess[at, 0] == unit and excess[at, 1] < first + TOKENS:
        within, row = excess[at, 1] - first, rows[unit, excess[at, 2]]
        for column in range(width):
            product = np.int32(excess[at, 3] * np.int32(row[column]))
            sums[within, column] = np.int32(sums[within, column] + product)
        at += 1
    return at


@njit
def keep_bytes(tables, unit, tile, ring, own, left, sums):
    """Keep a tile's rows as bytes for later units, and shift its sums by ``left`` (an address)."""
    groups, size = ring
    place = address_of(groups) + NBYTES * TOKENS * (size * tile + unit * own % size)
    down, step = address_of(tables.shifts[unit, 1]), np.int64(NBYTES * sums.shape[1])
    vectors = np.int64(own * GROUP // LANES)
    _bytes_of_sums(SOURCES, (address_of(sums), step, down, left, place, vectors))
