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
THRESHOLDS, STEP_BITS = octave_gain.THRESHOLDS, octave_gain.STEP_BITS
STEPS, USABLE = octave_gain.STEPS, octave_gain.USABLE
FURTHEST, INFINITY = octave_gain.FURTHEST, octave_gain.INFINITY

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
def steps_of(sizes: Any, centre: Any, steps: Any) -> None:
    """Nearest steps of positive numbers, less the centre."""
    bits = sizes.view(np.int32)
    for token in range(len(sizes)):
        above = np.int32(0)
        for k in range(STEPS):
            above += np.int32((bits[token] & MANTISSA) > THRESHOLDS[k])
        steps[token] = STEPS * ((bits[token] >> MANTISSA_BITS) - 127) + above - centre


@njit
def gains_of(steps: Any, centre: Any, gains: Any) -> None:
    bits = gains.view(np.int32)
    for token in range(len(steps)):
        whole = min(max(steps[token] + centre, -FURTHEST), FURTHEST)
        bits[token] = STEP_BITS[whole & (STEPS - 1)] + ((whole >> 4) << MANTISSA_BITS)


@njit
def measure(squares: Any, share: Any, centre: Any, steps: Any, gains: Any) -> bool:
    """Gains of rows from their sums of squares; False if one of them has none."""
    for token in range(len(squares)):
        squares[token] = np.sqrt(squares[token] * share)
    steps_of(squares, centre, steps)
    bits, usable = squares.view(np.int32), True
    for token in range(len(squares)):
        usable &= bits[token] < INFINITY and steps[token] <= USABLE
        steps[token] = max(steps[token], -USABLE)
    gains_of(steps, centre, gains)
    return usable


@njit
def fit(gains: Any, sums: Any) -> None:
    for token in range(len(gains)):
        along, energy = sums[0, token], sums[1, token]
        if along > 0 and energy > 0:
            factor = along / energy
            gains[token] *= min(max(factor, np.float32(0.5)), np.float32(2))
