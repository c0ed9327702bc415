"""Unpacks the symbols of a chunk to rows in one pass, in numba; see ``stages.integer_rows``.

The prediction from earlier units is added to a unit's levels (``one_step_levels``). Levels of
all its tokens become groups, which stay in the second-level cache. Then its columns are computed
panel by panel, so that every row of integers is read from memory once per chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from kvstore.codecs.kernels.emit.dots import TILE_TOKENS
from kvstore.codecs.kernels.units.kernel_parts import (
    GROUP,
    HOST,
    OFFSET,
    ROPE_TABLES,
    SEGMENTS,
    put_tile,
    split_tile,
)
from kvstore.codecs.kernels.units.one_step_levels import (
    COMPONENT,
    NARROW,
    PREDICTORS,
    add_levels,
    expect,
    known_words,
    levels_of_row,
    note_beyond,
    put_narrow,
    put_words,
)
from kvstore.codecs.loops.array_places import places_of as places_of
from kvstore.codecs.loops.numba_functions import (
    LINE,
    NBYTES,
    address_of,
    array_of,
    compiled,
    sources_of,
    tuple_of,
)

SOURCES = sources_of(__file__)

TILE_COLUMNS = HOST.tile_columns


@njit
def _levels_of_unit(
    coded: Any, rows: Any, counts: Any, expected: Any, words: Any, narrow: Any
) -> Any:
    """Put the levels of a unit into ``words`` and ``narrow``.

    ``expected``: int32 (predicted components, tokens), replaced by the final levels. Returns the
    number of rare codes used so far, and the excesses that bytes cannot hold, as ``_by_token``.
    """
    symbols, low, rare, known = coded
    first, last, num_rare = rows
    num_tokens = symbols.shape[1]
    levels, found = np.empty(num_tokens, np.int32), np.int64(0)
    beyond = np.empty((3, 0), np.int32)
    for row in range(first, last):
        num_rare = levels_of_row(symbols[row], low[row], known[row], rare, num_rare, levels)
        component = np.int64(known[row, COMPONENT])
        if component < len(expected):
            add_levels(levels, expected[component])
        else:
            beyond, found = _put(levels, component, counts, words, narrow, beyond, found)
    for predicted in range(min(len(expected), counts[0] + counts[1])):
        component = np.int64(predicted)
        beyond, found = _put(expected[component], component, counts, words, narrow, beyond, found)
    return num_rare, _by_token(beyond[:, :found], num_tokens)


@njit
def _put(
    levels: Any, component: Any, counts: Any, words: Any, narrow: Any, beyond: Any, found: Any
) -> Any:
    """Put the levels of one component into ``words`` if it is among the first, else ``narrow``.

    Returns ``beyond``, enlarged if necessary, and its number of entries.
    """
    if component < counts[0]:
        put_words(levels, component, (counts[0] + 1) // 2, words)
        return beyond, found
    row = np.int64(component - counts[0])
    more = put_narrow(levels, row, (counts[1] + GROUP - 1) // GROUP, narrow)
    if more:
        if found + more > beyond.shape[1]:
            beyond = _larger(beyond, found, 2 * (found + more))
        found = note_beyond(levels, row, beyond, found)
    return beyond, found


@njit
def _larger(beyond: Any, found: Any, capacity: Any) -> Any:
    """Copy the first entries; numba compiles an assignment of slices for two seconds."""
    larger = np.empty((3, capacity), np.int32)
    for row in range(3):
        for k in range(found):
            larger[row, k] = beyond[row, k]
    return larger


@njit
def _by_token(beyond: Any, num_tokens: Any) -> Any:
    """Sort the excesses that bytes cannot hold by token.

    Returns int64 (tokens + 2,), where each token's entries begin, and int32 (2, entries),
    components and excesses.
    """
    starts = np.zeros(num_tokens + 2, np.int64)
    for k in range(beyond.shape[1]):
        starts[beyond[0, k] + 2] += 1
    for token in range(num_tokens):
        starts[token + 2] += starts[token + 1]
    ordered = np.empty((2, beyond.shape[1]), np.int32)
    for k in range(beyond.shape[1]):
        at = starts[beyond[0, k] + 1]
        ordered[0, at], ordered[1, at] = beyond[1, k], beyond[2, k]
        starts[beyond[0, k] + 1] += 1
    return starts, ordered


@njit
def _add_beyond(beyond: Any, token: Any, count: Any, rows: Any, columns: Any, sums: Any) -> None:
    """Add the products of excesses, which bytes cannot hold, to the sums of a tile.

    ``sums``: int32 (tokens, columns); ``columns``: the first column in the unit, and their number.
    """
    starts, ordered = beyond
    first, dim = columns
    for within in range(count):
        for k in range(starts[token + within], starts[token + within + 1]):
            row, excess = rows[ordered[0, k]], ordered[1, k]
            for column in range(dim):
                product = np.int32(excess * np.int32(row[first + column]))
                sums[within, column] = np.int32(sums[within, column] + product)


def _unpack_function(sources: int) -> Any:
    """Make the function; ``sources`` is part of numba's cache key, which covers one file only."""

    def unpack_steps(
        coded: Any,
        first_rows: Any,
        units: Any,
        predictors: Any,
        gains: Any,
        ropes: Any,
        targets: Any,
    ) -> None:
        """Unpack rows into ``targets``.

        ``coded``: symbols, low bits, rare codes, properties of coded components.
        ``first_rows``: int64 (units + 1,), the first coded component of each unit. ``units``:
        counts, wide, narrow, begins, rows, means, parts, see ``fused_steps.StepTables``. ``gains``:
        fp32 (units, parts, tokens), times the scale of the sums. ``ropes``: ``ROPE_TABLES`` and
        whether rows are fp32.
        """
        counts, wide, matrix, begins, rows, means, part_of = units
        dim, num_segments = ropes[4], targets[0].shape[1]
        num_tokens, panels = coded[0].shape[1], wide.shape[1] // num_segments
        num_tiles, padded = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS, panels * TILE_COLUMNS
        pairs, groups = wide.shape[2], matrix.shape[2]
        words = np.empty(LINE + num_tiles * pairs * TILE_TOKENS * 2, np.int16)
        narrow = np.empty(LINE + num_tiles * groups * TILE_TOKENS * GROUP, NARROW)
        scratch = np.empty((TILE_TOKENS, padded), np.int32)
        predicted = predictors[1].shape[1]
        expected = np.empty((predicted, num_tokens), np.int32)
        stored = known_words(num_tokens, len(counts), predicted)
        sums, num_rare = address_of(scratch), np.int64(0)
        for unit in range(len(counts)):
            words[:] = 0
            narrow[:] = OFFSET
            num_pairs = np.int64((counts[unit, 0] + 1) // 2)
            num_groups = np.int64((counts[unit, 1] + GROUP - 1) // GROUP)
            known = (first_rows[unit], first_rows[unit + 1], num_rare)
            expect(stored, len(counts), predictors, unit, expected)
            num_rare, beyond = _levels_of_unit(coded, known, counts[unit], expected, words, narrow)
            for component in range(predicted):
                number = unit * predicted + component
                put_words(expected[component], number, len(counts) * predicted // 2, stored)
            any_beyond = beyond[0][num_tokens] > 0
            for segment in range(num_segments):
                mean = address_of(means[unit]) + NBYTES * segment * dim
                part = address_of(gains[unit, part_of[segment]])
                for tile in range(num_tiles):
                    token = tile * TILE_TOKENS
                    count = min(num_tokens - token, TILE_TOKENS)
                    for panel in range(panels):
                        number = segment * panels + panel
                        args = (
                            address_of(words) + tile * num_pairs * TILE_TOKENS * NBYTES,
                            address_of(wide[unit, number]),
                            num_pairs,
                            address_of(narrow) + tile * num_groups * TILE_TOKENS * NBYTES,
                            address_of(matrix[unit, number]),
                            num_groups,
                            counts[unit, 2],
                            address_of(begins[unit, number]),
                            sums + NBYTES * TILE_COLUMNS * panel,
                            NBYTES * padded,
                        )
                        split_tile(sources, args)
                    if any_beyond:
                        columns = (segment * dim, dim)
                        _add_beyond(beyond, token, count, rows[unit], columns, scratch)
                    place, gain = (unit, segment, token, count), part + NBYTES * token
                    put_tile(sums, padded, mean, gain, place, ropes, targets)
        # numba frees an array after its last use; its address does not count as a use
        words[0], narrow[0], scratch[0, 0], stored[0] = 0, 0, 0, 0

    return unpack_steps


_CODED = tuple_of(
    types.Array(types.uint8, 2, "C", readonly=True),
    types.Array(types.uint8, 2, "C", readonly=True),
    types.Array(types.int32, 1, "C", readonly=True),
    array_of(types.int32, 2),
)
_UNITS = tuple_of(
    array_of(types.int32, 2),
    array_of(types.uint32, 4),
    array_of(types.uint32, 4),
    array_of(types.int32, 3),
    types.Array(types.int8, 3, "C", readonly=True),
    array_of(types.float32, 2),
    array_of(types.int64, 1),
)
unpack = compiled(
    types.void,
    _unpack_function(SOURCES),
    _CODED,
    array_of(types.int64, 1),
    _UNITS,
    PREDICTORS,
    array_of(types.float32, 3),
    tuple_of(*ROPE_TABLES, types.boolean),
    SEGMENTS,
)
