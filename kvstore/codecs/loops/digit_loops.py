"""Digits to base 11 in numba functions: the loops of ``literature.turboquant_mlx``.

A row consists of groups: numbers of up to 16 bytes, of up to 37 digits, lowest first. A number is
divided by 11^3, 16 bits at a time, for many rows at once: three digits come out of one division.

``groups``: int64 (groups, 3), the first byte of each, its bytes, its digits. ``threes``: int64
(threes, 2), the first column of each, and its digits: three, or fewer at the end of a group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore.codecs.loops.numba_functions import compiled

BASE = 11
DIGITS = 3  # of one division
NUM_THREES = BASE**DIGITS
LIMBS = 8  # of 16 bits, in a group
LIMB_BITS = 16
THREE_BITS = 10.378  # the logarithm of 1,331, rounded down
TILE = 256  # rows that are divided at once
PART_DIGITS = 9  # that fit 32 bits
_DIVISOR, _LIMB, _BYTE = np.uint32(NUM_THREES), np.uint32(LIMB_BITS), np.uint32(8)
_PART, _ONE = np.uint64(BASE**PART_DIGITS), np.uint64(BASE)
_WORD, _LOW_WORD = np.uint64(32), np.uint64(0xFFFFFFFF)


@njit
def _load(packed: Any, start: int, count: int, group: Any, limbs: Any) -> None:
    """Write the bytes of a group of some rows to ``limbs``, uint32 (8, TILE), lowest first."""
    first, nbytes = group[0], group[1]
    for row in range(count):
        for word in range(nbytes // 4):
            value = np.uint32(0)
            for k in range(4):
                byte = np.uint32(packed[start + row, first + 4 * word + k])
                value = np.uint32(value | np.uint32(byte << np.uint32(8 * k)))
            limbs[2 * word, row] = value & np.uint32(0xFFFF)
            limbs[2 * word + 1, row] = value >> _LIMB
        for k in range(nbytes // 4 * 4, nbytes):
            byte = np.uint32(packed[start + row, first + k])
            above = np.uint32(limbs[k // 2, row] | np.uint32(byte << _BYTE))
            limbs[k // 2, row] = above if k % 2 else byte


@njit
def _divide(limb: Any, rest: Any) -> None:
    """Divide a limb, with the remainder of the limb above it, by 1,331."""
    for row in range(TILE):
        value = np.uint32(np.uint32(rest[row] << _LIMB) | limb[row])
        quotient = np.uint32(value // _DIVISOR)
        limb[row] = quotient
        rest[row] = np.uint32(value - np.uint32(quotient * _DIVISOR))


@njit
def _choices(packed: Any, groups: Any, choices: Any) -> None:
    """Write the number of the sum that each three digits of each row choose, (threes, rows)."""
    limbs, rest = np.zeros((LIMBS, TILE), np.uint32), np.empty(TILE, np.uint32)
    for start in range(0, packed.shape[0], TILE):
        count, three = min(TILE, packed.shape[0] - start), 0
        for number in range(len(groups)):
            _load(packed, start, count, groups[number], limbs)
            bits = 8.0 * groups[number, 1]
            for _ in range(0, groups[number, 2], DIGITS):
                rest[:] = 0
                for limb in range(int(np.ceil(bits / LIMB_BITS)) - 1, -1, -1):
                    _divide(limbs[limb], rest)
                for row in range(count):
                    choices[three, start + row] = rest[row]
                three, bits = three + 1, bits - THREE_BITS


def _unpack_digits(packed: Any, groups: Any, threes: Any, codes: Any) -> None:
    """Write the digits of every row to ``codes``, uint8 (rows, columns)."""
    digits = np.empty((NUM_THREES, DIGITS), np.uint8)
    for number in range(NUM_THREES):
        digits[number, 0] = number % BASE
        digits[number, 1] = number // BASE % BASE
        digits[number, 2] = number // (BASE * BASE)
    choices = np.empty((len(threes), packed.shape[0]), np.uint16)
    _choices(packed, groups, choices)
    for row in range(packed.shape[0]):
        for three in range(len(threes)):
            first, chosen = threes[three, 0], choices[three, row]
            for k in range(threes[three, 1]):
                codes[row, first + k] = digits[chosen, k]


def _pack_digits(codes: Any, groups: Any, packed: Any) -> None:
    """Write every row of digits to ``packed``, uint8 (rows, bytes)."""
    words = np.empty(4, np.uint64)
    for row in range(codes.shape[0]):
        column = 0
        for number in range(len(groups)):
            first, nbytes, digits = groups[number]
            words[:] = 0
            for k in range((digits - 1) // PART_DIGITS * PART_DIGITS, -1, -PART_DIGITS):
                carry = np.uint64(0)
                for at in range(min(k + PART_DIGITS, digits) - 1, k - 1, -1):
                    carry = carry * _ONE + np.uint64(codes[row, column + at])
                for at in range(4):
                    carry += words[at] * _PART
                    words[at] = carry & _LOW_WORD
                    carry >>= _WORD
            for k in range(nbytes):
                packed[row, first + k] = np.uint8(words[k // 4] >> np.uint64(8 * (k % 4)))
            column += digits


unpack_digits = compiled("void", _unpack_digits, "u1:2r i8:2 i8:2 u1:2")
pack_digits = compiled("void", _pack_digits, "u1:2r i8:2 u1:2")
