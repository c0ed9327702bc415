"""Turns the rows of a chunk into symbols in one pass, in numba; undone by ``unpack_one_step``.

Unit by unit: rows become components, the prediction from earlier units is subtracted, the rest is
quantised, and the levels that a reader will have are kept, from which later units are predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from kvstore.codecs.kernels.emit.dots import TILE_TOKENS
from kvstore.codecs.kernels.units.kernel_parts import tile_of_rows
from kvstore.codecs.kernels.units.one_step_levels import (
    COLUMNS,
    COMPONENT,
    ESCAPE,
    LARGEST,
    LOW_BITS,
    PER_STEP,
    PREDICTORS,
    add_levels,
    expect,
    known_words,
    levels_of_codes,
    put_words,
)
from kvstore.codecs.loops.numba_functions import (
    NBYTES,
    address_of,
    array_of,
    compiled,
    sources_of,
    tuple_of,
)
from kvstore.codecs.stages.integer_rows import LARGEST_INPUT
from kvstore.codecs.stages.uniform import LARGEST_CODE

SOURCES = sources_of(__file__)


@njit
def _put_rows(rows: Any, scale: Any, words: Any) -> None:
    """Round rows, fp32 (tokens, width), to ``words``, int16 (tiles, pairs, TILE_TOKENS, 2)."""
    for token in range(rows.shape[0]):
        tile, within = token // TILE_TOKENS, token % TILE_TOKENS
        for column in range(rows.shape[1]):
            value = np.rint(rows[token, column] * scale)
            limited = min(max(value, np.float32(-LARGEST_INPUT)), np.float32(LARGEST_INPUT))
            words[tile, column // 2, within, column % 2] = np.int16(limited)


@njit
def _put_components(words: Any, panels: Any, scratch: Any, sums: Any) -> None:
    """Multiply rows by panels, into ``sums``, int32 (components, tokens) of whole panels, tiles."""
    zeros = np.zeros(COLUMNS, np.int32)
    for panel in range(sums.shape[0] // COLUMNS):
        for tile in range(words.shape[0]):
            args = (
                address_of(words[tile]),
                address_of(panels[panel]),
                address_of(zeros),
                address_of(scratch),
                np.int64(words.shape[1]),
                NBYTES * TILE_TOKENS,
                NBYTES * COLUMNS,
                NBYTES * COLUMNS,
            )
            tile_of_rows(SOURCES, args)
            for column in range(COLUMNS):
                for within in range(TILE_TOKENS):
                    at = tile * TILE_TOKENS + within
                    sums[panel * COLUMNS + column, at] = scratch[within, column]
    zeros[0] = 0  # numba frees an array after its last use; its address does not count as a use


@njit
def _quantise(sums: Any, rate: Any, sizes: Any, codes: Any) -> None:
    """Put the codes of one component, int32 (tokens,), into ``codes``.

    ``sizes``: one over the step, the rounding, levels in a step. ``codes`` holds predicted levels.
    """
    per_step_one, rounding, per_step = sizes
    for token in range(len(codes)):
        component = np.float32(np.float64(sums[token]) * np.float64(rate))
        scaled = np.float32(component * per_step_one)
        beyond = np.float64(scaled) - np.float64(codes[token]) / np.float64(per_step)
        scaled = np.float32(beyond)
        if rounding == np.float32(0.5):
            code = np.rint(scaled)
        else:
            size = np.floor(np.float32(abs(scaled) + rounding))
            code = -size if scaled < 0 else size
        limited = min(max(code, np.float32(-LARGEST_CODE)), np.float32(LARGEST_CODE))
        codes[token] = np.int32(limited)


@njit
def _put_symbols(codes: Any, known: Any, symbols: Any, low: Any, rare: Any, num_rare: Any) -> Any:
    """Put codes into symbols and low bits, uint8 (tokens,), and those escaped into ``rare``.

    Returns the number of rare codes so far.
    """
    largest, low_bits = known[LARGEST], known[LOW_BITS]
    mask, escapes = np.int32((np.int32(1) << low_bits) - 1), 0
    for token in range(len(codes)):
        high = codes[token] >> low_bits
        escaped = abs(high) > largest
        escapes += escaped
        symbols[token] = np.uint8(known[ESCAPE] if escaped else high + largest)
        low[token] = np.uint8(codes[token] & mask)
    if escapes:
        for token in range(len(codes)):
            high = codes[token] >> low_bits
            if abs(high) > largest:
                rare[num_rare] = high
                num_rare += 1
    return num_rare


def _pack_function(sources: int) -> Any:
    """Make the function; ``sources`` is part of numba's cache key, which covers one file only."""

    def pack_steps(
        rows: Any, units: Any, coded: Any, predictors: Any, sizes: Any, found: Any
    ) -> Any:
        """Put the symbols of rows into ``found``; return the number of rare codes.

        ``rows``: fp32 (units, tokens, width), of unit size. ``units``: panels of the rows that give
        components, the value of a one in their sums, the number of components in use. ``coded``:
        properties of coded components, and the first of each unit. ``sizes``: the scale of rows
        before they are rounded, one over the step, the rounding. ``found``: symbols and low bits,
        uint8 (coded components, tokens), and rare codes, int32.
        """
        panels, rates, live = units
        known, first_rows = coded
        scale, per_step_one, rounding = sizes
        symbols, low, rare = found
        num_units, num_tokens, width = rows.shape
        tiles = (num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
        words = np.zeros((tiles, panels.shape[2], TILE_TOKENS, 2), np.int16)
        sums = np.empty((panels.shape[1] * COLUMNS, tiles * TILE_TOKENS), np.int32)
        scratch = np.empty((TILE_TOKENS, COLUMNS), np.int32)
        predicted = predictors[1].shape[1]
        expected = np.empty((predicted, num_tokens), np.int32)
        stored = known_words(num_tokens, num_units, predicted)
        codes = np.empty(num_tokens, np.int32)
        num_rare: Any = np.int64(0)
        for unit in range(num_units):
            _put_rows(rows[unit], scale, words)
            used = (live[unit] + COLUMNS - 1) // COLUMNS * COLUMNS
            _put_components(words, panels[unit], scratch, sums[:used])
            expect(stored, num_units, predictors, unit, expected)
            for row in range(first_rows[unit], first_rows[unit + 1]):
                component = np.int64(known[row, COMPONENT])
                is_predicted = component < predicted
                for token in range(num_tokens):
                    codes[token] = expected[component, token] if is_predicted else 0
                step = (per_step_one, rounding, max(known[row, PER_STEP], np.int32(1)))
                _quantise(sums[component], rates[unit, component], step, codes)
                num_rare = _put_symbols(codes, known[row], symbols[row], low[row], rare, num_rare)
                if is_predicted:
                    levels_of_codes(codes, known[row])
                    add_levels(codes, expected[component])
            for place in range(predicted):
                number = unit * predicted + place
                put_words(expected[place], number, num_units * predicted // 2, stored)
        # numba frees an array after its last use; its address does not count as a use
        words[0, 0, 0, 0], scratch[0, 0], stored[0] = 0, 0, sources & 0
        return num_rare

    return pack_steps


pack = compiled(
    types.int64,
    _pack_function(SOURCES),
    array_of(types.float32, 3),
    tuple_of(
        array_of(types.uint32, 4),
        types.Array(types.float32, 2, "C", readonly=True),
        array_of(types.int64, 1),
    ),
    tuple_of(array_of(types.int32, 2), array_of(types.int64, 1)),
    PREDICTORS,
    tuple_of(types.float32, types.float32, types.float32),
    tuple_of(array_of(types.uint8, 2), array_of(types.uint8, 2), array_of(types.int32, 1)),
)
