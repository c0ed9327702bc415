"""A byte for each row's size in sixteenths of an octave, by integers only: the same on all hosts.

Sizes are compared with thresholds in the bits of a float, and a sum of squares has one order: 16
columns side by side, then halves onto halves.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks import StackShape
from kvstore.errors import Corrupt

STEPS = 16  # per octave
REACH = 127  # steps from the centre; a code is 128 more
USABLE = REACH - STEPS  # before fitting, which may double or halve a gain
FURTHEST = 60 * STEPS  # no gain is larger than 2^60 or smaller than 2^-60
LANES = 16
MANTISSA_BITS = 23
MANTISSA = (1 << MANTISSA_BITS) - 1
INFINITY = 255 << MANTISSA_BITS
# Mantissas of the numbers half-way between two steps, and of the steps themselves.
THRESHOLDS = np.exp2((np.arange(STEPS) + 0.5) / STEPS).astype(np.float32).view(np.int32) & MANTISSA
STEP_BITS = np.exp2(np.arange(STEPS) / STEPS).astype(np.float32).view(np.int32)


class OctaveGain:
    """Implements ``Gain`` for units of one part."""

    is_fitted = True

    def __init__(self, shape: StackShape, centres: np.ndarray) -> None:
        """``centres``: (units, 1), in steps."""
        self._num_units = shape.num_units
        self._centres = centres.astype(np.int32).reshape(-1, 1)

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows too small for a gain get the smallest, which is close enough to nothing."""
        with np.errstate(all="ignore"):
            sizes = np.sqrt(squared_sizes(stack) * np.float32(1 / stack.shape[2]))
        steps = steps_of(sizes) - self._centres
        fits = (sizes.view(np.int32) < INFINITY) & (steps <= USABLE)
        steps = np.where(fits, np.maximum(steps, -USABLE), 0)
        return self._gains(steps)[:, :, None], ~fits[:, :, None]

    def write(self, gains: np.ndarray) -> bytes:
        steps = steps_of(gains[:, :, 0]) - self._centres
        return (np.clip(steps, -REACH, REACH) + REACH + 1).astype(np.uint8).tobytes()

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        codes = reader.take("u1", self._num_units, num_tokens)
        if not codes.all():
            raise Corrupt("a gain is none that was written")
        return self._gains(codes.astype(np.int32) - (REACH + 1))[:, :, None]

    def nbytes(self, num_tokens: int) -> int:
        return self._num_units * num_tokens

    def table(self) -> np.ndarray:
        """fp32 (units, 256): the gain of every code; of code 0, which never is, the smallest."""
        return self._gains(np.arange(256) - (REACH + 1))

    def _gains(self, steps: np.ndarray) -> np.ndarray:
        whole = np.clip(steps + self._centres, -FURTHEST, FURTHEST).astype(np.int32)
        octaves, rest = whole // STEPS, whole % STEPS
        gains: np.ndarray = (STEP_BITS[rest] + (octaves << MANTISSA_BITS)).view(np.float32)
        return gains


def squared_sizes(stack: np.ndarray) -> np.ndarray:
    """Sums of squares over the last axis, fp32, in the order that is part of the format."""
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
    """The nearest step of positive fp32 numbers, int32."""
    bits = np.ascontiguousarray(sizes).view(np.int32)
    above = np.searchsorted(THRESHOLDS, bits & MANTISSA, side="left")  # thresholds below
    steps: np.ndarray = STEPS * ((bits >> MANTISSA_BITS) - 127) + above.astype(np.int32)
    return steps
