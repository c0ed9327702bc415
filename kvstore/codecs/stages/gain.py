"""The size of every token: rows are divided by it when packed, and multiplied when restored.

Noise is then proportional to the token's size. Tokens with small values often get the most
attention, and a step that suits large ones would bury them in noise.
"""

from __future__ import annotations

import math

import numpy as np

from kvstore.codecs.floats import FP16_LARGEST
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Coder
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.errors import Corrupt

FP16_SMALLEST = np.float32(2.0**-14)
FURTHEST_OCTAVES = 60  # no gain is larger than 2^60 or smaller than 2^-60
# Of ``OctaveGain``: sizes are compared with thresholds in the bits of a float.
STEPS = 16  # per octave
CODES = 16
FURTHEST_STEPS = FURTHEST_OCTAVES * STEPS
ABOVE = STEPS // 4  # steps by which a row may exceed its gain; above that, levels would clip it
LANES = 16
MANTISSA_BITS = 23
MANTISSA = (1 << MANTISSA_BITS) - 1
INFINITY = 255 << MANTISSA_BITS
# Mantissas of the numbers half-way between two steps; and the bits of the steps themselves.
THRESHOLDS = np.exp2((np.arange(STEPS) + 0.5) / STEPS).astype(np.float32).view(np.int32) & MANTISSA
STEP_BITS = np.exp2(np.arange(STEPS) / STEPS).astype(np.float32).view(np.int32)
# Of ``LogGain``.
COARSE = 4  # steps per factor of two: 1.5 dB each
FINER = STEPS // COARSE  # of the steps above
REACH = 31 * COARSE
FURTHEST = FURTHEST_OCTAVES * COARSE


def root_mean_squares(stack: np.ndarray, shape: StackShape) -> np.ndarray:
    """Return the size of every gain group, fp32 (units, tokens, gain groups).

    ``stack``: fp32 (units, tokens, width). A size is infinite or undefined if a value of its group
    is.
    """
    sizes = np.empty((*stack.shape[:2], len(shape.gain_groups)), np.float32)
    with np.errstate(all="ignore"):
        for number, part in enumerate(shape.gain_groups):
            x = stack[:, :, part.start : part.stop]
            np.einsum("utw,utw->ut", x, x, out=sizes[:, :, number])
            sizes[:, :, number] /= part.stop - part.start
        return np.sqrt(sizes)


class NoGain:
    """Does not scale rows. Implements ``Gain``."""

    is_fitted = False

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = root_mean_squares(stack, self._shape)
        return np.ones_like(sizes), ~np.isfinite(sizes)

    def write(self, gains: np.ndarray) -> bytes:
        return b""

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        return np.ones(self._shape.gains_shape(num_tokens), np.float32)

    def nbytes(self, num_tokens: int) -> int:
        return 0


class HalfGain:
    """Stores an fp16 number for each row. Implements ``Gain``.

    ``is_fitted``: store the gain that fits the *quantised* row best. This costs nothing and undoes
    the shrinkage of a quantiser.
    """

    def __init__(self, shape: StackShape, is_fitted: bool = True) -> None:
        self._shape = shape
        self.is_fitted = is_fitted and len(shape.gain_groups) == 1

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gains = root_mean_squares(stack, self._shape)
        # Fitting may change a gain by a factor of two: the limits leave that much range.
        fits = (gains == 0) | ((gains >= 2 * FP16_SMALLEST) & (gains <= FP16_LARGEST / 2))
        return gains, ~fits

    def write(self, gains: np.ndarray) -> bytes:
        return gains.astype("<f2").tobytes()

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        gains = reader.take("<f2", *self._shape.gains_shape(num_tokens)).astype(np.float32)
        if not np.isfinite(gains).all():
            raise Corrupt("a gain is none that was written")
        return gains

    def nbytes(self, num_tokens: int) -> int:
        return 2 * math.prod(self._shape.gains_shape(num_tokens))


class LogGain:
    """Stores gains in equal steps of 1.5 dB, entropy-coded as integers. Implements ``Gain``."""

    is_fitted = False

    def __init__(self, shape: StackShape, centres: np.ndarray, coder: Coder) -> None:
        """``centres``: integers (units, gain groups), in steps.

        Gains lie within ``REACH`` steps of their centre.
        """
        self.centres = centres.astype(np.int32)
        self._parts = shape.gain_groups
        self._coder = coder

    @property
    def shares(self) -> np.ndarray:
        """The factors from sums of squares to means, fp32 (gain groups,)."""
        return np.array([1 / (part.stop - part.start) for part in self._parts], np.float32)

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return gains, and which rows no gain can represent; see ``Gain``.

        A row too small for any gain gets the smallest, which is close enough to zero.
        """
        with np.errstate(all="ignore"):
            squares = [squared_sizes(stack[:, :, part.start : part.stop]) for part in self._parts]
            sizes = np.sqrt(np.stack(squares, axis=2) * self.shares)
        steps = self._steps(sizes)
        fits = (sizes.view(np.uint32) < INFINITY) & (steps <= REACH)
        steps = np.where(fits, np.maximum(steps, -REACH), 0)
        return self._gains(steps), ~fits

    def write(self, gains: np.ndarray) -> bytes:
        return self._coder.write(np.clip(self._steps(gains), -REACH, REACH))

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        codes = self._coder.read(reader, num_tokens).astype(np.int32)
        return self._gains(np.clip(codes, -REACH, REACH))

    def nbytes(self, num_tokens: int) -> int:
        return self._coder.nbytes(num_tokens)

    def _steps(self, sizes: np.ndarray) -> np.ndarray:
        return (steps_of(sizes) + FINER // 2) // FINER - self.centres[:, None]

    def _gains(self, steps: np.ndarray) -> np.ndarray:
        whole = np.clip(steps + self.centres[:, None], -FURTHEST, FURTHEST)
        bits = STEP_BITS[whole % COARSE * FINER] + (whole // COARSE << MANTISSA_BITS)
        return bits.astype(np.int32).view(np.float32)


class OctaveGain:
    """Stores the nearest of sixteen gains that a unit learned. Implements ``Gain``.

    Only for units of one gain group. Gains are whole sixteenths of an octave. Sizes are compared
    with thresholds in the bits of a float, and squares are summed in one fixed order (16 columns
    side by side, then halves onto halves): the same on all hosts. Rows are divided by the stored
    gain, so a coarse gain costs little: the levels only fit the row a little less well.
    """

    is_fitted = True

    def __init__(self, shape: StackShape, steps: np.ndarray) -> None:
        """``steps``: integers (units, CODES), ascending, in sixteenths of an octave."""
        self._num_units = shape.num_units
        self.steps = np.clip(steps.astype(np.int32), -FURTHEST_STEPS, FURTHEST_STEPS)

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See ``Gain``: too small rows get the smallest gain, too large ones none."""
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
        """Return the gain of every code, fp32 (units, CODES)."""
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
    """Return the largest size, in steps, that gets each gain, int32 like ``steps`` (units, CODES).

    A size gets the nearer of two gains, but the larger one if they lie far apart: too large a gain
    makes a row coarse, too small a gain clips it.
    """
    ends = steps + ABOVE
    ends[:, :-1] = np.minimum(ends[:, :-1], (steps[:, :-1] + steps[:, 1:]) // 2)
    return ends.astype(np.int32)


def pairs_of(num_tokens: int) -> int:
    """Return the bytes of a unit's codes: two tokens a byte, the first in its lower half."""
    return -(-num_tokens // 2)


def squared_sizes(stack: np.ndarray) -> np.ndarray:
    """Return sums of squares over the last axis, fp32, in the order that the format defines.

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
    """Return the nearest step of positive fp32 numbers, int32 of the same shape."""
    bits = np.ascontiguousarray(sizes).view(np.int32)
    above = np.searchsorted(THRESHOLDS, bits & MANTISSA, side="left")  # thresholds below
    return STEPS * ((bits >> MANTISSA_BITS) - 127) + above.astype(np.int32)
