"""Turns symbols into groups of levels, and predicts levels from earlier units, in numba.

See ``stages.uniform`` and ``entropy.class_coder``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from kvstore.codecs.kernels.emit.dots import TILE_TOKENS
from kvstore.codecs.kernels.units.kernel_parts import GROUP, HOST, OFFSET, tile_of_rows
from kvstore.codecs.loops.numba_functions import NBYTES, address_of, array_of, sources_of, tuple_of
from kvstore.codecs.stages.integer_rows import BYTE
from kvstore.codecs.stages.uniform import LARGEST_CODE, LARGEST_EXPECTED, LARGEST_LEVEL

SOURCES = sources_of(__file__)

# Columns of the properties of a coded component; the three after them are added to levels.
UNIT, COMPONENT, LARGEST, ESCAPE, LOW_BITS, PER_STEP = range(6)
NARROW = np.uint8 if GROUP == 4 else np.int16
BITS_OF_NARROW = 255 if GROUP == 4 else -1
COLUMNS = HOST.tile_columns
# uint32 (units, panels, pairs of known components, COLUMNS), and int32 (units, components): the
# numbers of bits by which sums are shifted.
PREDICTORS = tuple_of(array_of(types.uint32, 4), array_of(types.int32, 2))


@njit
def levels_of_row(symbols: Any, low: Any, known: Any, rare: Any, num_rare: Any, levels: Any) -> Any:
    """Put the levels of one component, int32 (tokens,), into ``levels``.

    ``symbols``, ``low``: uint8 (tokens,); ``known``: int32 (9,), the component's properties.
    Returns the number of ``rare`` codes used so far.
    """
    largest, low_bits = known[LARGEST], known[LOW_BITS]
    for token in range(len(symbols)):
        levels[token] = np.int32(symbols[token]) - largest
    escapes = 0
    for token in range(len(symbols)):
        escapes += symbols[token] == known[ESCAPE]
    if escapes:
        for token in range(len(symbols)):
            if symbols[token] == known[ESCAPE]:
                levels[token] = rare[num_rare]
                num_rare += 1
    if low_bits:
        for token in range(len(symbols)):
            levels[token] = np.int32((levels[token] << low_bits) + low[token])
    levels_of_codes(levels, known)
    return num_rare


@njit
def levels_of_codes(levels: Any, known: Any) -> None:
    """Replace the codes of one component, int32 (tokens,), by their levels."""
    per_step = known[PER_STEP]
    first, second, third = known[PER_STEP + 1], known[PER_STEP + 2], known[PER_STEP + 3]
    for token in range(len(levels)):
        code = min(max(levels[token], np.int32(-LARGEST_CODE)), np.int32(LARGEST_CODE))
        size = np.int32(abs(code))
        added = third if size > 2 else (second if size > 1 else (first if size else np.int32(0)))
        level = min(np.int32(np.int32(size * per_step) + added), np.int32(LARGEST_LEVEL))
        levels[token] = -level if code < 0 else level


@njit
def put_words(levels: Any, component: Any, num_groups: Any, words: Any) -> None:
    """Put levels into ``words``, int16: tile by tile, pair by pair of components.

    A pair holds two components of ``TILE_TOKENS`` tokens.
    """
    group, lane = component // 2, component % 2
    for token in range(len(levels)):
        tile, within = token // TILE_TOKENS, token % TILE_TOKENS
        at = ((tile * num_groups + group) * TILE_TOKENS + within) * 2 + lane
        words[at] = np.int16(levels[token])


@njit
def put_narrow(levels: Any, component: Any, num_groups: Any, narrow: Any) -> Any:
    """Write one component's levels, clipped to a byte, into ``narrow``, grouped by tile.

    Returns the number of levels that were too large and were clipped.
    """
    group, lane, beyond = component // GROUP, component % GROUP, 0
    for token in range(len(levels)):
        level = levels[token]
        cut = min(max(level, np.int32(-BYTE)), np.int32(BYTE))
        beyond += level != cut
        tile, within = token // TILE_TOKENS, token % TILE_TOKENS
        at = ((tile * num_groups + group) * TILE_TOKENS + within) * GROUP + lane
        narrow[at] = NARROW((cut + OFFSET) & BITS_OF_NARROW)
    return beyond


@njit
def note_beyond(levels: Any, component: Any, beyond: Any, count: Any) -> Any:
    """Append the excess that ``put_narrow`` cut off to ``beyond``; return its number of entries.

    ``beyond``: int32 (3, capacity): tokens, components and excess.
    """
    for token in range(len(levels)):
        level = levels[token]
        cut = min(max(level, np.int32(-BYTE)), np.int32(BYTE))
        if level != cut:
            beyond[0, count], beyond[1, count], beyond[2, count] = token, component, level - cut
            count += 1
    return count


@njit
def known_words(num_tokens: Any, num_units: Any, components: Any) -> Any:
    """Allocate the final levels of all units, int16, in the order of ``put_words``."""
    tiles = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    return np.zeros(max(tiles * num_units * components * TILE_TOKENS, 1), np.int16)


@njit
def expect(known: Any, num_units: Any, predictors: Any, unit: Any, expected: Any) -> None:
    """Put the predicted levels of ``unit`` into ``expected``, int32 (components, tokens).

    ``known``: from ``known_words``, filled for the earlier units.
    """
    panels, finer = predictors
    pairs = finer.shape[1] // 2
    expected[:] = 0
    if not pairs:
        return
    depth = panels.shape[2] // pairs
    blocks = min(unit, depth)
    zeros, scratch = np.zeros(COLUMNS, np.int32), np.empty((TILE_TOKENS, COLUMNS), np.int32)
    first = address_of(known) + NBYTES * TILE_TOKENS * pairs * (unit - blocks)
    for panel in range(panels.shape[1] if blocks else 0):
        matrix = address_of(panels[unit, panel]) + NBYTES * COLUMNS * pairs * (depth - blocks)
        for tile in range((expected.shape[1] + TILE_TOKENS - 1) // TILE_TOKENS):
            args = (
                first + NBYTES * TILE_TOKENS * pairs * num_units * tile,
                matrix,
                address_of(zeros),
                address_of(scratch),
                np.int64(blocks * pairs),
                NBYTES * TILE_TOKENS,
                NBYTES * COLUMNS,
                NBYTES * COLUMNS,
            )
            tile_of_rows(SOURCES, args)
            _put_expected(scratch, finer[unit], panel, tile, expected)
    # numba frees an array after its last use; its address does not count as a use
    zeros[0], scratch[0, 0] = 0, 0


@njit
def _put_expected(sums: Any, finer: Any, panel: Any, tile: Any, expected: Any) -> None:
    token, first = tile * TILE_TOKENS, panel * COLUMNS
    columns = min(expected.shape[0] - first, COLUMNS)
    for within in range(TILE_TOKENS):
        for column in range(columns):
            shift = finer[first + column]
            half = np.int32(np.int32(1) << shift) >> np.int32(1)
            level = np.int32(sums[within, column] + half) >> shift
            limited = min(max(level, np.int32(-LARGEST_EXPECTED)), np.int32(LARGEST_EXPECTED))
            sums[within, column] = limited
    if expected.shape[1] - token >= TILE_TOKENS:
        for column in range(columns):
            for within in range(TILE_TOKENS):
                expected[first + column, token + within] = sums[within, column]
    else:
        for column in range(columns):
            for within in range(expected.shape[1] - token):
                expected[first + column, token + within] = sums[within, column]


@njit
def add_levels(levels: Any, expected: Any) -> None:
    """Add coded levels to predicted ones, in ``expected``; both int32 (tokens,)."""
    for token in range(len(levels)):
        level = np.int32(levels[token] + expected[token])
        limited = min(max(level, np.int32(-LARGEST_LEVEL)), np.int32(LARGEST_LEVEL))
        expected[token] = limited
