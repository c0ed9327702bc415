"""Packs rows to integer codes in one pass, in numba; the inverse of ``unpack_fixed_rate``.

Gains of rows are measured, coded and fitted as ``stages.gain`` defines it; their arrays have
one number for each token of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore.codecs.kernels.units.kernel_parts import (
    BLOCK,
    HOST,
    LANES,
    ROPE_TABLES,
    SEGMENTS,
    count_of,
    load_rows,
    put_codes,
    put_columns,
    put_integers,
    put_squares,
    tile_of_rows,
)
from kvstore.codecs.loops.numba_functions import (
    LINE,
    NBYTES,
    address_of,
    compiled,
    first_line_of,
    sources_of,
    tuple_of,
)
from kvstore.codecs.stages.gain import CODES, INFINITY, MANTISSA, MANTISSA_BITS, STEPS, THRESHOLDS
from kvstore.codecs.stages.integer_klt import MAX_BITS

SOURCES = sources_of(__file__)

TILE_TOKENS, TILE_COLUMNS = HOST.tile_tokens, HOST.tile_columns


@njit
def steps_of(bits, steps):
    """Put the nearest steps, int32, of positive fp32 numbers with these ``bits`` into ``steps``."""
    for token in range(len(bits)):
        above = np.int32(0)
        for k in range(STEPS):
            above += np.int32((bits[token] & MANTISSA) > THRESHOLDS[k])
        steps[token] = STEPS * ((bits[token] >> MANTISSA_BITS) - 127) + above


@njit
def codes_of(steps, ends, codes):
    """Put the codes, uint8, of steps into ``codes``.

    ``ends``: int32 (CODES,), the largest size that gets each code, in steps.
    """
    for token in range(len(steps)):
        code = np.int32(0)
        for k in range(CODES - 1):
            code += np.int32(steps[token] > ends[k])
        codes[token] = code


@njit
def measure(squares, bits, share, ends, table, steps, codes, gains):
    """Put the gains of rows, fp32, into ``gains``; return False if a row has none.

    ``squares``: sums of squares of rows, fp32, overwritten; ``bits``: the same as int32. ``share``:
    the factor from sums to means. ``table``: fp32 (CODES,), the gain of each code.
    """
    for token in range(len(squares)):
        squares[token] = np.sqrt(squares[token] * share)
    steps_of(bits, steps)
    codes_of(steps, ends, codes)
    usable = True
    for token in range(len(squares)):
        # Unsigned: a NaN may have its sign set.
        if np.uint32(bits[token]) >= INFINITY or steps[token] > ends[CODES - 1]:
            usable = False
        gains[token] = table[codes[token]]
    return usable


@njit
def put_pairs(codes, pairs):
    """Put two codes into a byte each, the first into its lower half.

    If the number of codes is odd, the last byte's upper half is zero.
    """
    for k in range(len(pairs)):
        pairs[k] = codes[2 * k]
        if 2 * k + 1 < len(codes):
            pairs[k] |= codes[2 * k + 1] << 4


@njit
def fit(gains, sums):
    """Scale gains so that restored rows come closest to the exact ones.

    ``sums``: fp32 (2, tokens), products of exact and restored components, and squares of restored
    ones.
    """
    for token in range(len(gains)):
        along, energy = sums[0, token], sums[1, token]
        if along > 0 and energy > 0:
            factor = along / energy
            gains[token] *= min(max(factor, np.float32(0.5)), np.float32(2))


@njit
def load_block(unit, block, count, means, columns, ropes, segments, rows):
    """Load rows of a unit from token ``block`` on, without RoPE and means, to address ``rows``."""
    rope_of, halves, cosines, sines, dim, as_words = ropes
    addresses, strides = segments
    for segment in range(addresses.shape[1]):
        rope, column, stride = rope_of[unit, segment], segment * dim, strides[unit, segment]
        angle = NBYTES * (rope * cosines.shape[1] + block) * cosines.shape[2]
        args = (
            as_words,
            addresses[unit, segment] + block * stride,
            means + NBYTES * column,
            address_of(cosines) + angle,
            address_of(sines) + angle,
            rows + NBYTES * column,
            stride,
            NBYTES * cosines.shape[2],
            NBYTES * columns,
            count,
            halves[rope],
            dim,
        )
        load_rows(SOURCES, args)


@njit
def _columns_of_block(words, columns, count, groups):
    """Transpose rows of pairs of 16-bit integers to columns of 64 pairs, one for each token."""
    for first in range(0, count, LANES):
        for column in range(0, columns // 2, LANES):
            source = words + 2 * first * columns + NBYTES * column
            target = groups + NBYTES * (column * BLOCK + first)
            put_columns(SOURCES, (source, 2 * columns, target, NBYTES * BLOCK))


@njit
def _components_of_block(matrix, groups, begin, sums, sizes):
    """Multiply a block; ``sizes``: rows of the matrix, those in use, pairs of columns, tokens."""
    num_rows, live, num_groups, count = sizes
    steps = (num_groups, NBYTES * num_rows, NBYTES * BLOCK, NBYTES * BLOCK)
    for component in range(0, live, TILE_TOKENS):
        for first in range(0, count, TILE_COLUMNS):
            source, target = matrix + NBYTES * component, NBYTES * (component * BLOCK + first)
            place = (source, groups + NBYTES * first, begin, sums + target)
            tile_of_rows(SOURCES, (*place, *steps))


@njit
def _codes_of_block(numbers, tables, planes, sums, runs):
    """Code a block; ``tables``: addresses of bounds, values and rates, bytes between the first."""
    bounds, values, rates, width = tables
    along, energy = address_of(sums[0]), address_of(sums[1])
    for bits in range(MAX_BITS, 0, -1):
        args = (bits, numbers, bounds, values, rates, width, planes, along, energy, runs[bits])
        put_codes(SOURCES, args)
        numbers += runs[bits] * NBYTES * BLOCK
        bounds += runs[bits] * width
        values += runs[bits] * width
        rates += runs[bits] * NBYTES
        planes += runs[bits] * bits * 8


@njit
def _put_planes(block_planes, num_planes, count, planes, at, step):
    """Put the planes of a block into the payload; bits without a token become zero."""
    nbytes, last = (count + 7) // 8, np.uint8(0xFF >> (-count % 8))
    for k in range(num_planes):
        for i in range(nbytes):
            planes[at + i] = block_planes[k, i]
        planes[at + nbytes - 1] &= last
        at += step


def _pack_function(sources_digest: int) -> Any:
    """Make the function; the digest is part of numba's cache key, which covers one file only."""

    def pack_units(segments, num_tokens, units, sizes, ropes, pairs, planes, scratch):
        """Pack rows; False if one cannot be represented, and then the output is invalid.

        ``units``: runs, matrix, bounds, values, rates, means, gains (ends, sizes), see
        ``fused_rate._tables``. ``sizes``: pairs of columns, factor of a sum of squares, scale of
        integers. ``ropes``: ``ROPE_TABLES`` and whether rows are fp32. Output: ``pairs``, uint8
        (units, pairs of tokens), and ``planes``, uint8 (bytes,). ``scratch``: from ``scratch_of``.
        """
        runs, matrix, bounds, values, rates, means, gain_ends, gain_tables = units
        num_pairs, share, scale = sizes
        plane_nbytes = (num_tokens + 7) // 8
        columns, num_components = means.shape[1], rates.shape[1]
        lines, block_planes, squares, gains, steps, codes, factors, fits, begin = scratch
        rows, words = first_line_of(lines[0]), first_line_of(lines[1])
        groups, sums = first_line_of(lines[2]), first_line_of(lines[3])
        squares, square_bits = squares
        gains, gain_bits = gains
        plane = 0
        for unit in range(len(runs)):
            num_planes, live = count_of(runs[unit])
            ends, table = gain_ends[unit], gain_tables[unit]
            for block in range(0, num_tokens, BLOCK):
                count = min(num_tokens - block, BLOCK)
                mean = address_of(means[unit])
                load_block(unit, block, count, mean, columns, ropes, segments, rows)
                squared = (rows, NBYTES * columns, columns, address_of(squares), count)
                put_squares(SOURCES, squared)
                here = (steps[:count], codes[:count], gains[:count])
                measured = (squares[:count], square_bits[:count])
                if not measure(*measured, share, ends, table, *here):
                    return False
                for token in range(count):
                    factors[token] = np.float32(1) / gains[token] * scale
                put_integers(sources_digest, (rows, address_of(factors), words, columns, count))
                _columns_of_block(words, columns, count, groups)
                lengths = (num_components, live, num_pairs, count)
                factor, start = address_of(matrix[unit]), address_of(begin)
                _components_of_block(factor, groups, start, sums, lengths)
                fits[:] = 0
                tables = (address_of(bounds[unit]), address_of(values[unit]))
                more = (address_of(rates[unit]), NBYTES * bounds.shape[2])
                into = address_of(block_planes)
                _codes_of_block(sums, (*tables, *more), into, fits, runs[unit])
                at = plane * plane_nbytes + block // 8
                _put_planes(block_planes, num_planes, count, planes, at, plane_nbytes)
                fit(gains[:count], fits)
                steps_of(gain_bits[:count], steps[:count])
                codes_of(steps[:count], ends, codes[:count])
                put_pairs(codes[:count], pairs[unit, block // 2 : (block + count + 1) // 2])
            plane += num_planes
        return True

    return pack_units


pack = compiled(
    "b1",
    _pack_function(SOURCES),
    SEGMENTS,
    "i8",
    tuple_of("i8:2 u4:3 i4:3 f4:3 f4:2 f4:2 i4:2 f4:2"),
    tuple_of("i8 f4 f4"),
    tuple_of(*ROPE_TABLES, "b1"),
    "u1:2 u1:1",
    tuple_of("u1:2 u1:2", *[tuple_of("f4:1 i4:1")] * 2, "i4:1 u1:1 f4:1 f4:2 i4:1"),
)


def scratch_of(columns: int, num_components: int) -> tuple[Any, ...]:
    """Return room for a block: its rows, words, groups and sums, in bytes, and its planes.

    Then for squares and gains, each fp32 with its bits, steps, codes, factors and fits; and zeros.
    """
    lines = np.zeros((4, LINE + NBYTES * BLOCK * max(columns, num_components)), np.uint8)
    squares, gains = np.zeros((2, BLOCK), np.float32)
    return (
        lines,
        np.zeros((MAX_BITS * num_components, 8), np.uint8),
        (squares, squares.view(np.int32)),
        (gains, gains.view(np.int32)),
        np.zeros(BLOCK, np.int32),
        np.zeros(BLOCK, np.uint8),
        np.zeros(BLOCK, np.float32),
        np.zeros((2, BLOCK), np.float32),
        np.zeros(BLOCK, np.int32),
    )
