"""The size of every token, divided out before the transform and multiplied in after it.

Noise is then in proportion to the token: tokens with small values often get the most attention, and
a step that suits the large ones would drown them.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import FP16_LARGEST
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stacks.stage_protocols import Coder
from kvstore.codecs.stages.octave_gain import (
    INFINITY,
    MANTISSA_BITS,
    STEP_BITS,
    STEPS,
    squared_sizes,
    steps_of,
)
from kvstore.errors import Corrupt

FP16_SMALLEST = np.float32(2.0**-14)
COARSE = 4  # steps per factor of two: 1.5 dB each
REACH = 31 * COARSE
FINER = STEPS // COARSE  # of the steps of ``octave_gain``
FURTHEST = 60 * COARSE  # no gain is larger than 2^60 or smaller than 2^-60


def root_mean_squares(stack: np.ndarray, shape: StackShape) -> np.ndarray:
    """Returns the size of every gain group, fp32 (units, tokens, gain groups).

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
        return np.ones(
            (self._shape.num_units, num_tokens, len(self._shape.gain_groups)), np.float32
        )

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
        shape = (self._shape.num_units, num_tokens, len(self._shape.gain_groups))
        gains = reader.take("<f2", *shape).astype(np.float32)
        if not np.isfinite(gains).all():
            raise Corrupt("a gain is none that was written")
        return gains

    def nbytes(self, num_tokens: int) -> int:
        return 2 * self._shape.num_units * num_tokens * len(self._shape.gain_groups)


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
        """Measures gains.

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
