"""turboquant-mlx: eleven levels after signs and Hadamard.

Idea: a number of levels that is not a power of two, for a size between 3 and 4 bits.
Formula: codes are digits to base 11. The project packs two digits to a byte and calls that 3.5
bits, but it is 4. As digits of one large number, 37 to 16 bytes, they really take 3.46.
Project: turboquant-mlx, after TurboQuant (arXiv 2504.19874).
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines
from kvstore.codecs.literature.stages.rotated import SignHadamard, normal_levels
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import HalfGain

NUM_LEVELS = 11
GROUP_BYTES = 16
LIMB_BITS = 32


def base11() -> Codec:
    """Makes the preset ``base11``."""
    return StackCodec("base11.1", HeadPipelines(_eleven_levels, _eleven_levels))


class Digits:
    """Packs codes below ``base``, 2 to 256, as digits of large numbers. Implements ``Coder``.

    Codes of a token are split into groups of as many digits as fit 16 bytes, lowest first.
    """

    def __init__(self, shape: StackShape, base: int) -> None:
        self._shape, self._base = shape, base
        self._per_group = _digits_in(base, GROUP_BYTES)
        whole, rest = divmod(shape.width, self._per_group)
        self._sizes = [GROUP_BYTES] * whole + ([_bytes_for(base, rest)] if rest else [])

    def write(self, codes: np.ndarray) -> bytes:
        rows = codes.reshape(-1, self._shape.width)
        packed = [self._packed(rows[:, columns], size) for columns, size in self._groups()]
        return np.concatenate(packed, axis=1).tobytes()

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        num_rows = self._shape.num_units * num_tokens
        packed, at = reader.take("u1", num_rows, sum(self._sizes)), 0
        rows = np.empty((num_rows, self._shape.width), np.uint8)
        for columns, size in self._groups():
            self._unpack(packed[:, at : at + size], rows[:, columns])
            at += size
        return rows.reshape(self._shape.num_units, num_tokens, self._shape.width)

    def nbytes(self, num_tokens: int) -> int:
        return self._shape.num_units * num_tokens * sum(self._sizes)

    def least_nbytes(self, num_tokens: int) -> int:
        return self.nbytes(num_tokens)

    def _groups(self) -> list[tuple[slice, int]]:
        width, step = self._shape.width, self._per_group
        starts = range(0, width, step)
        columns = [slice(start, min(start + step, width)) for start in starts]
        return list(zip(columns, self._sizes, strict=True))

    def _packed(self, digits: np.ndarray, size: int) -> np.ndarray:
        """Returns uint8 (rows, size): multiplies and adds, in limbs of 32 bits, lowest first."""
        limbs = np.zeros((len(digits), GROUP_BYTES // 4), np.uint64)
        for column in range(digits.shape[1] - 1, -1, -1):
            carry = digits[:, column].astype(np.uint64)
            for limb in range(limbs.shape[1]):
                carry += limbs[:, limb] * np.uint64(self._base)
                limbs[:, limb] = carry & np.uint64(0xFFFFFFFF)
                carry >>= np.uint64(LIMB_BITS)
        return limbs.astype("<u4").view(np.uint8)[:, :size]

    def _unpack(self, packed: np.ndarray, digits: np.ndarray) -> None:
        """Divides and keeps remainders; bytes that ``_packed`` cannot give become digits, too."""
        whole = np.zeros((len(packed), GROUP_BYTES), np.uint8)
        whole[:, : packed.shape[1]] = packed
        limbs = whole.view("<u4").astype(np.uint64)
        for column in range(digits.shape[1]):
            rest = np.zeros(len(packed), np.uint64)
            for limb in range(limbs.shape[1] - 1, -1, -1):
                value = rest << np.uint64(LIMB_BITS) | limbs[:, limb]
                limbs[:, limb], rest = np.divmod(value, np.uint64(self._base))
            digits[:, column] = rest


def _digits_in(base: int, nbytes: int) -> int:
    digits = 0
    while base ** (digits + 1) <= 1 << 8 * nbytes:
        digits += 1
    return digits


def _bytes_for(base: int, digits: int) -> int:
    largest: int = base**digits - 1
    return -(-largest.bit_length() // 8)


def _eleven_levels(shape: StackShape) -> Pipeline:
    gain, rotation = HalfGain(shape, is_fitted=False), SignHadamard(shape)
    levels, coder = normal_levels(shape, NUM_LEVELS), Digits(shape, NUM_LEVELS)
    return Pipeline(shape, (), gain, (rotation,), levels, coder)
