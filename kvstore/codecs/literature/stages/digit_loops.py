"""Digits to base 11 in numba functions: the loops of ``literature.turboquant_mlx``.

A row consists of groups: numbers of up to 16 bytes, of up to 37 digits, lowest first. A number is
four words of 32 bits, multiplied and divided by 11^9, which fits a word: nine digits at once.

``groups``: int64 (groups, 3), the first byte of each, its bytes, its digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.codecs.loops.numba_functions import compiled

BASE = 11
WORDS = 4  # in a group
PART_DIGITS = 9
_PART, _ONE = np.uint64(BASE**PART_DIGITS), np.uint64(BASE)
_WORD, _LOW_WORD = np.uint64(32), np.uint64(0xFFFFFFFF)


def _unpack_digits(packed: Any, groups: Any, codes: Any) -> None:
    """Write the digits of every row to ``codes``, uint8 (rows, columns)."""
    words = np.empty(WORDS, np.uint64)
    for row in range(codes.shape[0]):
        column = 0
        for number in range(len(groups)):
            first, nbytes, digits = groups[number]
            words[:] = 0
            for k in range(nbytes):
                words[k // 4] |= np.uint64(packed[row, first + k]) << np.uint64(8 * (k % 4))
            for k in range(0, digits, PART_DIGITS):
                rest = np.uint64(0)
                for at in range(WORDS - 1, -1, -1):
                    value = rest << _WORD | words[at]
                    words[at] = value // _PART
                    rest = value - words[at] * _PART
                for at in range(k, min(k + PART_DIGITS, digits)):
                    codes[row, column + at] = rest % _ONE
                    rest //= _ONE
            column += digits


def _pack_digits(codes: Any, groups: Any, packed: Any) -> None:
    """Write every row of digits to ``packed``, uint8 (rows, bytes)."""
    words = np.empty(WORDS, np.uint64)
    for row in range(codes.shape[0]):
        column = 0
        for number in range(len(groups)):
            first, nbytes, digits = groups[number]
            words[:] = 0
            for k in range((digits - 1) // PART_DIGITS * PART_DIGITS, -1, -PART_DIGITS):
                carry = np.uint64(0)
                for at in range(min(k + PART_DIGITS, digits) - 1, k - 1, -1):
                    carry = carry * _ONE + np.uint64(codes[row, column + at])
                for at in range(WORDS):
                    carry += words[at] * _PART
                    words[at] = carry & _LOW_WORD
                    carry >>= _WORD
            for k in range(nbytes):
                packed[row, first + k] = np.uint8(words[k // 4] >> np.uint64(8 * (k % 4)))
            column += digits


unpack_digits = compiled("void", _unpack_digits, "u1:2r i8:2 u1:2")
pack_digits = compiled("void", _pack_digits, "u1:2r i8:2 u1:2")
