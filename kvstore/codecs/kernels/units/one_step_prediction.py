"""Predicts levels of a unit from those of earlier units, in numba; see ``stages.prediction``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from kvstore.codecs.kernels.emit.dots import TILE_TOKENS
from kvstore.codecs.kernels.sources import SOURCES
from kvstore.codecs.kernels.units.host_intrinsics import HOST, tile_of_rows
from kvstore.codecs.loops.numba_functions import NBYTES, address_of, array_of, tuple_of
from kvstore.codecs.stages.uniform import LARGEST_EXPECTED, LARGEST_LEVEL

COLUMNS = HOST.tile_columns
# uint32 (units, panels, pairs of known components, COLUMNS), and int32 (units, components): the
# numbers of bits by which sums are shifted.
PREDICTORS = tuple_of(array_of(types.uint32, 4), array_of(types.int32, 2))


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
    token = tile * TILE_TOKENS
    count = min(expected.shape[1] - token, TILE_TOKENS)
    for column in range(min(expected.shape[0] - panel * COLUMNS, COLUMNS)):
        component = panel * COLUMNS + column
        half = np.int32(np.int32(1) << finer[component]) >> np.int32(1)
        for within in range(count):
            level = np.int32(sums[within, column] + half) >> finer[component]
            limited = min(max(level, np.int32(-LARGEST_EXPECTED)), np.int32(LARGEST_EXPECTED))
            expected[component, token + within] = limited


@njit
def add_levels(levels: Any, expected: Any) -> None:
    """Add coded levels to predicted ones, in ``expected``; both int32 (tokens,)."""
    for token in range(len(levels)):
        level = np.int32(levels[token] + expected[token])
        limited = min(max(level, np.int32(-LARGEST_LEVEL)), np.int32(LARGEST_LEVEL))
        expected[token] = limited
