"""Stores each row's size in four bits: the index of a gain that its unit learned, with integers.

Gains are whole sixteenths of an octave. Sizes are compared with thresholds in the bits of a float,
and squares are summed in one fixed order (16 columns side by side, then halves onto halves): the
same on all hosts. Rows are divided by the stored gain, so a coarse gain costs little: the levels
only fit the row a little less well.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.stack_shape import StackShape

STEPS = 16  # per octave
CODES = 16
ABOVE = STEPS // 4  # steps by which a row may exceed its gain; above that, levels would clip it
FURTHEST = 60 * STEPS  # no gain is larger than 2^60 or smaller than 2^-60
LANES = 16
MANTISSA_BITS = 23
MANTISSA = (1 << MANTISSA_BITS) - 1
INFINITY = 255 << MANTISSA_BITS
# Mantissas of the numbers half-way between two steps; and the bits of the steps themselves.
THRESHOLDS = np.exp2((np.arange(STEPS) + 0.5) / STEPS).astype(np.float32).view(np.int32) & MANTISSA
STEP_BITS = np.exp2(np.arange(STEPS) / STEPS).astype(np.float32).view(np.int32)


class OctaveGain:
    """Takes the nearest of sixteen learned gains.

    Implements ``Gain`` for units of one gain group.
    """

    is_fitted = True

    def __init__(self, shape: StackShape, steps: np.ndarray) -> None:
        """``steps``: integers (units, CODES), ascending, in sixteenths of an octave."""
        self._num_units = shape.num_units
        self.steps = np.clip(steps.astype(np.int32), -FURTHEST, FURTHEST)

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Measures gains; rows that are too small get the smallest, too large ones none."""
        with np.errstate(all="ignore"):
            sizes = np.sqrt(squared_sizes(stack) * np.float32(1 / stack.shape[2]))
        steps = steps_of(sizes)
        usable = sizes.view(np.uint32) < INFINITY  # excludes NaN of either sign, too
        fits = usable & (steps <= ends_of(self.steps)[:, -1:])
        return self._gains(self._codes(steps))[:, :, None], ~fits[:, :, None]

    def write(self, gains: np.ndarray) -> bytes:
        codes = self._codes(steps_of(gains[:, :, 0]))
        even = np.pad(codes, [(0, 0), (0, codes.shape[1] % 2)])
        pairs: np.ndarray = even[:, ::2] | even[:, 1::2] << 4
        return pairs.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        pairs = reader.take("u1", self._num_units, pairs_of(num_tokens))
        codes = np.stack([pairs & (CODES - 1), pairs >> 4], axis=2).reshape(self._num_units, -1)
        return self._gains(codes[:, :num_tokens])[:, :, None]

    def nbytes(self, num_tokens: int) -> int:
        return self._num_units * pairs_of(num_tokens)

    def table(self) -> np.ndarray:
        """Returns the gain of every code, fp32 (units, CODES)."""
        octaves, rest = self.steps // STEPS, self.steps % STEPS
        return (STEP_BITS[rest] + (octaves << MANTISSA_BITS)).view(np.float32)

    def _codes(self, steps: np.ndarray) -> np.ndarray:
        codes = np.zeros(steps.shape, np.uint8)
        for end in ends_of(self.steps).T[:-1]:
            codes += steps > end[:, None]
        return codes

    def _gains(self, codes: np.ndarray) -> np.ndarray:
        return np.take_along_axis(self.table(), codes.astype(np.int64), axis=1)


def ends_of(steps: np.ndarray) -> np.ndarray:
    """Returns the largest size, in steps, that gets each gain, int32 like ``steps`` (units, CODES).

    A size gets the nearer of two gains, but the larger one if they lie far apart: too large a gain
    makes a row coarse, too small a gain clips it.
    """
    ends = steps + ABOVE
    ends[:, :-1] = np.minimum(ends[:, :-1], (steps[:, :-1] + steps[:, 1:]) // 2)
    return ends.astype(np.int32)


def pairs_of(num_tokens: int) -> int:
    """Returns the bytes of a unit's codes; the first of two tokens is in a byte's lower half."""
    return -(-num_tokens // 2)


def squared_sizes(stack: np.ndarray) -> np.ndarray:
    """Returns sums of squares over the last axis, fp32, in the order that the format defines.

    ``stack``: fp32 (..., width).
    """
    missing = -stack.shape[-1] % LANES
    padded = np.pad(stack, [(0, 0)] * (stack.ndim - 1) + [(0, missing)])
    columns = padded.reshape(*stack.shape[:-1], -1, LANES)
    sums = columns[..., 0, :] * columns[..., 0, :]
    for k in range(1, columns.shape[-2]):
        sums = sums + columns[..., k, :] * columns[..., k, :]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return np.ascontiguousarray(sums[..., 0])


def steps_of(sizes: np.ndarray) -> np.ndarray:
    """Returns the nearest step of positive fp32 numbers, int32 of the same shape."""
    bits = np.ascontiguousarray(sizes).view(np.int32)
    above = np.searchsorted(THRESHOLDS, bits & MANTISSA, side="left")  # thresholds below
    return STEPS * ((bits >> MANTISSA_BITS) - 127) + above.astype(np.int32)
