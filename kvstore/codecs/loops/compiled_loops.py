"""Inner loops of stages as numba functions, whose results equal numpy's to the last bit.

Rows are components, (units times components, tokens), contiguous.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.loops.numba_functions import compiled

ROWS_AT_ONCE = 64


def _quantise_levels(x, scales, kinds, bounds, counts, codes):
    """Count the bounds of its row's kind that lie below each value times its scale."""
    scaled = np.empty(x.shape[1], np.float32)
    for row in range(x.shape[0]):
        kind = kinds[row]
        for token in range(x.shape[1]):
            scaled[token] = x[row, token] * scales[row]
            codes[row, token] = 0
        for k in range(counts[kind]):
            bound = bounds[kind, k]
            for token in range(x.shape[1]):
                codes[row, token] += np.uint8(scaled[token] > bound)


def _restore_levels(codes, deviations, kinds, levels, counts, out):
    """Fill ``out`` with levels times deviations. Codes beyond the last level count as the last."""
    table = np.empty(levels.shape[1], np.float32)
    for row in range(codes.shape[0]):
        kind = kinds[row]
        last = counts[kind]
        for k in range(last + 1):
            table[k] = levels[kind, k] * deviations[row]
        for token in range(codes.shape[1]):
            out[row, token] = table[min(codes[row, token], last)]


def add_and_subtract(rows, distances):
    """Replace pairs of elements by sum and difference, for each distance; fp32 (rows, dim)."""
    for row in range(rows.shape[0]):
        for at in range(len(distances)):
            distance = distances[at]
            for first in range(0, rows.shape[1], 2 * distance):
                for k in range(first, first + distance):
                    x, y = rows[row, k], rows[row, k + distance]
                    rows[row, k] = x + y
                    rows[row, k + distance] = x - y


def _pack_planes(words, bits, packed):
    """Pack eight codes, the bytes of a uint64, into one byte of each plane.

    ``words``: uint64 (rows, words), the first token in the lowest byte. ``packed``: uint8 (planes,
    words). The product moves the lowest bit of byte k to bit 56 + k.
    """
    plane = 0
    for row in range(words.shape[0]):
        for place in range(bits[row]):
            for at in range(words.shape[1]):
                eight = (words[row, at] >> np.uint64(place)) & np.uint64(0x0101010101010101)
                gathered = (eight * np.uint64(0x0102040810204080)) >> np.uint64(56)
                packed[plane, at] = np.uint8(gathered)
            plane += 1


def _unpack_planes(packed, bits, spread, words):
    """Undo ``_pack_planes``; ``words`` must be zeros.

    ``spread``: the bits of every byte as eight bytes, uint64 (256,).
    """
    plane = 0
    for row in range(words.shape[0]):
        for place in range(bits[row]):
            for at in range(words.shape[1]):
                words[row, at] |= spread[packed[plane, at]] << np.uint64(place)
            plane += 1


def _turn_keys(stack, units, start, cos, sin, direction, interleaved):
    """Rotate the channels of some units by RoPE.

    ``stack``: fp32 (units, tokens, width), in place.
    """
    half = cos.shape[1]
    for number in range(len(units)):
        unit = units[number]
        for token in range(stack.shape[1]):
            for k in range(half):
                first = start + (2 * k if interleaved else k)
                second = first + (1 if interleaved else half)
                x, y = stack[unit, token, first], stack[unit, token, second]
                c, s = cos[token, k], sin[token, k] * direction
                stack[unit, token, first] = x * c - y * s
                stack[unit, token, second] = x * s + y * c


def _round_to_bf16(words, out):
    """Round fp32 bit patterns, uint32 (n,), to those of bf16, uint16 (n,); a NaN stays a NaN."""
    for i in range(len(words)):
        word = words[i]
        rounded = (
            word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
        is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16((word >> np.uint32(16)) | np.uint32(0x40) if is_nan else rounded)


def _nearest_vectors(rows, vectors, halves, codes):
    """Find the nearest vector of each row: the first with the largest product less ``halves``.

    ``rows``: fp32 (tables, dim, rows). ``vectors``: fp32 (tables, vectors, dim); ``halves``: half
    their squared lengths. ``codes``: uint8 (tables, rows). Products are summed from the first
    component to the last.
    """
    dim = rows.shape[1]
    block = np.zeros((dim, ROWS_AT_ONCE), np.float32)  # loops of a fixed length become vector code
    most = np.empty(ROWS_AT_ONCE, np.float32)
    found = np.empty(ROWS_AT_ONCE, np.float32)
    best = np.empty(ROWS_AT_ONCE, np.float32)
    for table in range(rows.shape[0]):
        for start in range(0, rows.shape[2], ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows.shape[2] - start)
            for at in range(dim):
                for row in range(count):
                    block[at, row] = rows[table, at, start + row]
            most[:] = -np.inf
            best[:] = 0
            for k in range(vectors.shape[1]):
                found[:] = 0
                for at in range(0, dim - 3, 4):
                    a, b = vectors[table, k, at], vectors[table, k, at + 1]
                    c, d = vectors[table, k, at + 2], vectors[table, k, at + 3]
                    for row in range(ROWS_AT_ONCE):
                        product = found[row] + block[at, row] * a
                        product += block[at + 1, row] * b
                        product += block[at + 2, row] * c
                        found[row] = product + block[at + 3, row] * d
                for at in range(dim // 4 * 4, dim):
                    a = vectors[table, k, at]
                    for row in range(ROWS_AT_ONCE):
                        found[row] += block[at, row] * a
                half = halves[table, k]
                number = np.float32(k)
                for row in range(ROWS_AT_ONCE):
                    product = found[row] - half
                    is_nearer = product > most[row]
                    most[row] = product if is_nearer else most[row]
                    best[row] = number if is_nearer else best[row]
            for row in range(count):
                codes[table, start + row] = np.uint8(best[row])


quantise_levels = compiled("void", _quantise_levels, "f4:2 f4:1 i8:1 f4:2 i8:1 u1:2")
restore_levels = compiled("void", _restore_levels, "u1:2 f4:1 i8:1 f4:2 i8:1 f4:2")
pack_planes = compiled("void", _pack_planes, "u8:2 i8:1 u1:2")
unpack_planes = compiled("void", _unpack_planes, "u1:2 i8:1 u8:1 u8:2")
butterflies = compiled("void", add_and_subtract, "f4:2 i8:1")
turn_keys = compiled("void", _turn_keys, "f4:3 i8:1 i8 f4:2 f4:2 f4 b1")
round_to_bf16 = compiled("void", _round_to_bf16, "u4:1 u2:1")
nearest_vectors = compiled("void", _nearest_vectors, "f4:3 f4:3 f4:2 u1:2")
