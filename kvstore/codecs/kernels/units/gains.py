"""Gains of rows in numba: measured, coded and fitted; the counterpart of ``stages.octave_gain``.

All arrays have one number for each token of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore.codecs.stages import octave_gain

MANTISSA, MANTISSA_BITS = octave_gain.MANTISSA, octave_gain.MANTISSA_BITS
THRESHOLDS = octave_gain.THRESHOLDS
STEPS, CODES = octave_gain.STEPS, octave_gain.CODES
INFINITY = octave_gain.INFINITY


@njit
def steps_of(sizes: Any, steps: Any) -> None:
    """Put the nearest steps, int32, of positive fp32 numbers into ``steps``."""
    bits = sizes.view(np.int32)
    for token in range(len(sizes)):
        above = np.int32(0)
        for k in range(STEPS):
            above += np.int32((bits[token] & MANTISSA) > THRESHOLDS[k])
        steps[token] = STEPS * ((bits[token] >> MANTISSA_BITS) - 127) + above


@njit
def codes_of(steps: Any, ends: Any, codes: Any) -> None:
    """Put the codes, uint8, of steps into ``codes``.

    ``ends``: int32 (CODES,), the largest size that gets each code, in steps.
    """
    for token in range(len(steps)):
        code = np.int32(0)
        for k in range(CODES - 1):
            code += np.int32(steps[token] > ends[k])
        codes[token] = code


@njit
def measure(
    squares: Any, share: Any, ends: Any, table: Any, steps: Any, codes: Any, gains: Any
) -> bool:
    """Put the gains of rows, fp32, into ``gains``; return False if a row has none.

    ``squares``: sums of squares of rows, fp32, overwritten; ``share``: the factor from sums to
    means; ``table``: fp32 (CODES,), the gain of each code.
    """
    for token in range(len(squares)):
        squares[token] = np.sqrt(squares[token] * share)
    steps_of(squares, steps)
    codes_of(steps, ends, codes)
    bits, usable = squares.view(np.uint32), True  # unsigned: a NaN may have its sign set
    for token in range(len(squares)):
        usable &= bits[token] < INFINITY and steps[token] <= ends[CODES - 1]
        gains[token] = table[codes[token]]
    return usable


@njit
def put_pairs(codes: Any, pairs: Any) -> None:
    """Put two codes into a byte each, the first into its lower half.

    If the number of codes is odd, the last byte's upper half is zero.
    """
    for k in range(len(pairs)):
        pairs[k] = codes[2 * k]
        if 2 * k + 1 < len(codes):
            pairs[k] |= codes[2 * k + 1] << 4


@njit
def fit(gains: Any, sums: Any) -> None:
    """Scale gains so that restored rows come closest to the exact ones.

    ``sums``: fp32 (2, tokens), products of exact and restored components, and squares of restored
    ones.
    """
    for token in range(len(gains)):
        along, energy = sums[0, token], sums[1, token]
        if along > 0 and energy > 0:
            factor = along / energy
            gains[token] *= min(max(factor, np.float32(0.5)), np.float32(2))
