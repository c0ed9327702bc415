"""Scratch memory, counts and gains that packing and unpacking of units share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from kvstore.codecs.numba_functions import array_of, tuple_of
from kvstore.codecs.pieces import octave_gain
from kvstore.codecs.pieces.integer_klt import MAX_BITS

BLOCK = 64  # tokens that go through a kernel together
LINE = 64  # bytes of the cache; vectors that cross two lines take twice as long
NBYTES = 4  # of a float or a word
MANTISSA, MANTISSA_BITS = octave_gain.MANTISSA, octave_gain.MANTISSA_BITS
THRESHOLDS = octave_gain.THRESHOLDS
STEPS, CODES = octave_gain.STEPS, octave_gain.CODES
INFINITY = octave_gain.INFINITY

ANGLES = array_of(types.float32, 3)
# Which turn each segment takes (0: none), channels that each turns, halved, angles, and head_dim.
TURNS = (array_of(types.int64, 2), array_of(types.int64, 1), ANGLES, ANGLES, types.int64)
SEGMENTS = tuple_of(array_of(types.int64, 2), array_of(types.int64, 2))


@njit
def start_of(array: Any) -> Any:
    """Address of the first whole line of some scratch memory."""
    return np.int64(array.ctypes.data + LINE - 1) // LINE * LINE


@njit
def address_of(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@njit
def count_of(runs: Any) -> Any:
    """Planes and components of a unit."""
    planes, components = 0, 0
    for bits in range(1, MAX_BITS + 1):
        planes += bits * runs[bits]
        components += runs[bits]
    return planes, components


@njit
def steps_of(sizes: Any, steps: Any) -> None:
    """Nearest steps of positive numbers."""
    bits = sizes.view(np.int32)
    for token in range(len(sizes)):
        above = np.int32(0)
        for k in range(STEPS):
            above += np.int32((bits[token] & MANTISSA) > THRESHOLDS[k])
        steps[token] = STEPS * ((bits[token] >> MANTISSA_BITS) - 127) + above


@njit
def codes_of(steps: Any, ends: Any, codes: Any) -> None:
    """``ends``: the most steps that each code takes."""
    for token in range(len(steps)):
        code = np.int32(0)
        for k in range(CODES - 1):
            code += np.int32(steps[token] > ends[k])
        codes[token] = code


@njit
def measure(
    squares: Any, share: Any, ends: Any, table: Any, steps: Any, codes: Any, gains: Any
) -> bool:
    """Gains of rows from their sums of squares; False if one of them has none."""
    for token in range(len(squares)):
        squares[token] = np.sqrt(squares[token] * share)
    steps_of(squares, steps)
    codes_of(steps, ends, codes)
    bits, usable = squares.view(np.uint32), True  # a NaN may have its sign set
    for token in range(len(squares)):
        usable &= bits[token] < INFINITY and steps[token] <= ends[CODES - 1]
        gains[token] = table[codes[token]]
    return usable


@njit
def put_pairs(codes: Any, pairs: Any) -> None:
    """Two codes to a byte, the first in its lower half; the last byte's second may be none."""
    for k in range(len(pairs)):
        pairs[k] = codes[2 * k]
        if 2 * k + 1 < len(codes):
            pairs[k] |= codes[2 * k + 1] << 4


@njit
def fit(gains: Any, sums: Any) -> None:
    for token in range(len(gains)):
        along, energy = sums[0, token], sums[1, token]
        if along > 0 and energy > 0:
            factor = along / energy
            gains[token] *= min(max(factor, np.float32(0.5)), np.float32(2))
