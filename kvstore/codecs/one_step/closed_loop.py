"""Codes each unit relative to a prediction by the units before it, in whole numbers.

Layers are strongly related: the *restored* rows of the units before, which a reader has, predict a
large part of a unit's row. Packing codes the residual; restoring adds it to the prediction. Both
compute the prediction from the same whole numbers, so it is the same on all hosts, whatever was
rounded or clipped. This is differential coding in a closed loop (Cutler 1952), over layers. A
coarse prediction costs bits, never quality, so it is computed from bytes, which processors multiply
fastest.

    sums = known (bytes of restored rows before) << up  +  own (levels of the unit's codes)

A sum counts in its channel's unit, a power of two. The residual's principal components are coded
with one step for all, which is reverse water-filling (Berger 1971); components that the step would
quantise to zero are dropped. A code stands for a whole number of *levels*, fractions of a step,
near the centroid of its cell. A component's class determines how many, so a decoder's table can
give the levels themselves. Nearly all levels are bytes; the few components of large deviation, the
*wide* ones, come first and have levels and rows of 16 bits, whose sums are finer by a power of two.

Sums have 32 bits and wrap around, so that their order does not matter. Those of a packer's own
components never get that large, see ``most_input``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.codecs.entropy.class_coder import DEAD
from kvstore.codecs.entropy.tables import FIRST_WIDE

BYTE = 127
NUM_LEVELS = 4  # of a class: in a step, and added to codes of size 1, 2, and 3 or more
LARGEST_CODE = LARGEST_LEVEL = 32767
MOST_BITS = 30  # of a shift
# Added to sizes before they are rounded down. Less than a half, since a code of one costs several
# bits more than a zero.
ROUNDING = 0.4
# Rows converted to floats at a time. fp32 adds up so many products of two bytes exactly, and fp64
# so many of two words.
ROWS_AT_ONCE = 512


def most_input(width: int) -> int:
    """Return the largest residual of a channel, a power of two.

    The product of a row of such residuals and a row of ``encode`` (norm: ``encode_norm``) then fits
    32 bits.
    """
    return int(min(2.0 ** np.floor((35 - np.log2(width)) / 2), 2.0**14))


def encode_norm(width: int) -> float:
    """Return the Euclidean norm of the rows of ``encode``."""
    return float(min(0.98 * 2.0**31 / (most_input(width) * width**0.5), 32000.0) - width**0.5)


@dataclass(frozen=True, eq=False)
class LoopIntegers:
    """The integers of a stack's units.

    ``known``: int8 (units, reach, width), the prediction from the last ``reach`` channels of the
    units before; if there are fewer channels, rows of zeros come first. ``up``: uint8
    (units, width), the bits by which its sums are shifted. ``wide``: int16 (units, most wide ones,
    width), ``own``: int8 (units, most others, width): what a level adds, padded with zeros.
    ``finer``: uint8 (units,), the bits by which sums of wide ones are finer. ``exponents``: int8
    (units, width), of channels' units. ``down``: uint8 (units, width), the bits by which sums are
    shifted to bytes. ``encode``: int16 (units, components, width), ``rates``: fp32 (units,
    components): the rows that give components, in steps, of residuals that are shifted by ``rest``
    bits, uint8 (units, width). ``classes``: uint8 (units, components), falling; ``DEAD`` where a
    unit has no more components. ``levels``: int16 (classes, NUM_LEVELS).
    """

    known: np.ndarray
    up: np.ndarray
    wide: np.ndarray
    own: np.ndarray
    finer: np.ndarray
    exponents: np.ndarray
    down: np.ndarray
    encode: np.ndarray
    rates: np.ndarray
    rest: np.ndarray
    classes: np.ndarray
    levels: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """The number of wide components and of others of each unit, int64 (units, 2)."""
        wide, live = ((self.classes >= first).sum(axis=1) for first in (FIRST_WIDE, DEAD + 1))
        return np.stack([wide, live - wide], axis=1)

    @property
    def scales(self) -> np.ndarray:
        """The least unit of a unit's channels, fp32 (units,)."""
        return np.ldexp(np.float32(1), self.exponents.min(axis=1))

    @property
    def left(self) -> np.ndarray:
        """The bits by which sums are shifted to count in ``scales``, int32 (units, width)."""
        exponents = self.exponents.astype(np.int32)
        return exponents - exponents.min(axis=1, keepdims=True)


class ClosedLoop:
    """Quantises residuals unit by unit; codes are int32. Implements ``Quantiser``."""

    def __init__(self, integers: LoopIntegers) -> None:
        self.integers = integers
        self._limit = most_input(integers.own.shape[2])
        self._counts = integers.counts.tolist()

    def quantise(self, stack: np.ndarray) -> np.ndarray:
        """Return codes (units, tokens, components) for rows of unit size."""
        codes = np.zeros((*stack.shape[:2], self.integers.classes.shape[1]), np.int32)
        past = np.zeros((stack.shape[1], 0), np.int8)
        for unit, rows in enumerate(stack):
            codes[unit], _, known = self.follow(unit, rows, past)
            past = self.joined(past, known)
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """Return rows of unit size, fp32 (units, tokens, width)."""
        i = self.integers
        restored = np.empty((*codes.shape[:2], i.own.shape[2]), np.float32)
        past = np.zeros((codes.shape[1], 0), np.int8)
        for unit, own in enumerate(codes):
            sums = self._restored(unit, self._expected(unit, past), own)
            past = self.joined(past, self._bytes(unit, sums))
            restored[unit] = _wrapped(sums << i.left[unit]).astype(np.float32) * i.scales[unit]
        return restored

    def joined(self, past: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return the last channels of ``past`` and ``known`` together, int8 (tokens, channels)."""
        both = np.concatenate([past, known], axis=1)
        return both[:, max(both.shape[1] - self.integers.known.shape[1], 0) :]

    def follow(self, unit: int, rows: np.ndarray, past: np.ndarray) -> _Followed:
        """Pack one unit.

        ``rows``: fp32 (tokens, width), of unit size. ``past``: int8 (tokens, channels), the bytes
        of the units before.
        """
        expected = self._expected(unit, past)
        codes = self._codes(unit, rows, expected)
        sums = self._restored(unit, expected, codes)
        return _Followed(codes, sums, self._bytes(unit, sums))

    def _expected(self, unit: int, past: np.ndarray) -> np.ndarray:
        """Return the sums predicted from the units before, int64 (tokens, width)."""
        i = self.integers
        sums = _product(past, i.known[unit, i.known.shape[1] - past.shape[1] :])
        return _wrapped(sums << i.up[unit])

    def _codes(self, unit: int, rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
        i, num = self.integers, sum(self._counts[unit])
        channels = np.ldexp(np.float32(1), -i.exponents[unit].astype(np.int32))
        residuals = np.rint(rows * channels).astype(np.int64) - expected
        shift = i.rest[unit].astype(np.int64)
        words = _wrapped(residuals + ((1 << shift) >> 1)) >> shift
        words = np.clip(words, -self._limit, self._limit)
        sums = _wrapped(_product(words, i.encode[unit, :num].T)).astype(np.float32)
        sizes = np.abs(sums * i.rates[unit, :num])
        sizes = np.minimum(np.floor(sizes + np.float32(ROUNDING)), np.float32(LARGEST_CODE))
        codes = np.zeros((len(rows), i.classes.shape[1]), np.int32)
        codes[:, :num] = np.copysign(sizes, sums)
        return codes

    def _restored(self, unit: int, expected: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return a unit's sums, int64 (tokens, width)."""
        i, (wide, others) = self.integers, self._counts[unit]
        levels, finer = self._levels(unit, codes), int(i.finer[unit])
        sums = (expected << finer) + ((1 << finer) >> 1)
        sums = _wrapped(sums + _product(levels[:, :wide], i.wide[unit, :wide])) >> finer
        own = _product(levels[:, wide : wide + others], i.own[unit, :others])
        return _wrapped(sums + own)

    def _levels(self, unit: int, codes: np.ndarray) -> np.ndarray:
        """Return the levels of codes, int32 of their shape."""
        table = self.integers.levels[self.integers.classes[unit]]
        return levels_of(codes, table.astype(np.int32))

    def _bytes(self, unit: int, sums: np.ndarray) -> np.ndarray:
        """Return the bytes of a unit from which later ones are predicted, int8 (tokens, width)."""
        shift = self.integers.down[unit].astype(np.int64)
        rounded = _wrapped(sums + ((1 << shift) >> 1)) >> shift
        return np.clip(rounded, -BYTE, BYTE).astype(np.int8)


class _Followed(NamedTuple):
    """A packed unit: int32 codes (tokens, components), sums, and bytes for later units."""

    codes: np.ndarray
    sums: np.ndarray
    known: np.ndarray


def levels_of(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the levels of codes, int32 of their shape.

    ``table``: int32 (..., NUM_LEVELS), of their classes.
    """
    sizes = np.abs(np.clip(codes, -LARGEST_CODE, LARGEST_CODE))
    chosen = [sizes == k for k in range(NUM_LEVELS - 1)]
    added = np.select(chosen, [0, table[..., 1], table[..., 2]], table[..., 3])
    levels = np.minimum(sizes * table[..., 0] + added, LARGEST_LEVEL)
    return np.where(codes < 0, -levels, levels).astype(np.int32)


def _wrapped(sums: np.ndarray) -> np.ndarray:
    return sums.astype(np.int32).astype(np.int64)


def _product(factors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return exact products, int64, computed with floats because BLAS is fast for them."""
    small = rows.dtype == np.int8 and int(np.abs(factors).max(initial=0)) <= BYTE
    kind = np.float32 if small else np.float64
    sums = np.zeros((len(factors), rows.shape[1]), np.int64)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        sums += np.matmul(factors[:, part].astype(kind), rows[part].astype(kind)).astype(np.int64)
    return sums


class LoopTables(NamedTuple):
    """The integers of all units that both packing and restoring read.

    A *group* of a matrix holds several known channels, two wide components, or several others.

    Attributes:
        counts: int64 (units, 2), the numbers of wide components and of others.
        known, wide, own: matrices, uint32 (units, panels, groups, columns): from known channels,
            from wide components and from others to channels.
        begins: int32 (units, 2, columns), the initial values of known and of own sums.
        shifts: int32 (units, 2, columns), of sums up, and down to bytes.
        finer: int32 (units,), the bits by which sums of wide components are finer.
        rows: int8 (units, others, width), the others' rows of ``own``.
        constants: int32 (units, CONSTANTS, components), wide ones first, then others from a
            multiple of the lanes on; see ``kernels.emit.loop_tiles``.
    """

    counts: np.ndarray
    known: np.ndarray
    wide: np.ndarray
    own: np.ndarray
    begins: np.ndarray
    shifts: np.ndarray
    finer: np.ndarray
    rows: np.ndarray
    constants: np.ndarray


class RestoringTables(NamedTuple):
    """The integers of all units that only restoring reads.

    Attributes:
        left: int32 (units, columns), shifts to a common unit.
        means: fp32 (units, width).
        part_of: int64 (head vectors of a unit,), the gain group of each.
    """

    left: np.ndarray
    means: np.ndarray
    part_of: np.ndarray


class PackingTables(NamedTuple):
    """The integers of all units that only packing reads.

    Attributes:
        means: fp32 (units, width).
        channels: fp32 (units, columns), one over channels' units.
        rest: int32 (units, columns), shifts of residuals.
        encode: uint32 (units, panels, pairs of channels, components), from residuals to components.
    """

    means: np.ndarray
    channels: np.ndarray
    rest: np.ndarray
    encode: np.ndarray
