"""turboquant-mlx: eleven levels after signs and Hadamard.

Idea: a number of levels that is not a power of two, for a size between 3 and 4 bits.
Formula: codes are digits to base 11. The project packs two digits to a byte and calls that 3.5
bits, but it is 4. As digits of one large number, 37 to 16 bytes, they really take 3.46.
Project: turboquant-mlx, after TurboQuant (arXiv 2504.19874).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines
from kvstore.codecs.literature.stages.rotated import SignHadamard, normal_levels
from kvstore.codecs.loops.compiled import compiled_module
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import HalfGain

NUM_LEVELS = 11
BITS = math.log2(NUM_LEVELS)
GROUP_BYTES = 16
GROUP_DIGITS = 37  # as many as fit
LIMB_BITS = 32
LOOPS: Final = "kvstore.codecs.literature.stages.digit_loops"


def base11() -> Codec:
    """Makes the preset ``base11``."""
    pipelines = HeadPipelines(_eleven_levels, _eleven_levels)
    return StackCodec("base11.1", pipelines, least_bits=(BITS, BITS))


class Digits:
    """Packs codes below 11 as digits of large numbers. Implements ``Coder``.

    Codes of a token are split into groups of 37, lowest first.
    """

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape
        counts = [min(GROUP_DIGITS, shape.width - x) for x in range(0, shape.width, GROUP_DIGITS)]
        sizes = [_bytes_for(count) for count in counts]
        self.nbytes_of_row = sum(sizes)
        firsts = np.cumsum([0, *sizes[:-1]])
        # int64 (groups, 3): the first byte of each, its bytes, its digits.
        self.groups = np.stack([firsts, sizes, counts], axis=1).astype(np.int64)

    def write(self, codes: np.ndarray) -> bytes:
        rows = np.ascontiguousarray(codes).reshape(-1, self._shape.width)
        if fast := compiled_module(LOOPS):
            packed = np.empty((len(rows), self.nbytes_of_row), np.uint8)
            fast.pack_digits(rows, self.groups, packed)
            return packed.tobytes()
        parts = [digits_to_bytes(rows[:, columns], nbytes) for columns, _, nbytes in self.slices()]
        return np.concatenate(parts, axis=1).tobytes()

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        packed = reader.take("u1", self._shape.num_units, num_tokens, self.nbytes_of_row)
        codes = np.empty((*packed.shape[:2], self._shape.width), np.uint8)
        rows, flat = packed.reshape(-1, self.nbytes_of_row), codes.reshape(-1, self._shape.width)
        if fast := compiled_module(LOOPS):
            fast.unpack_digits(rows, self.groups, flat)
            return codes
        for columns, places, _ in self.slices():
            digits_of_bytes(rows[:, places], flat[:, columns])
        return codes

    def nbytes(self, num_tokens: int) -> int:
        return self._shape.num_units * num_tokens * self.nbytes_of_row

    def least_nbytes(self, num_tokens: int) -> int:
        return self.nbytes(num_tokens)

    def slices(self) -> Iterator[tuple[slice, slice, int]]:
        """Yields the columns, the bytes and the number of bytes of every group."""
        column = 0
        for first, nbytes, digits in self.groups.tolist():
            yield slice(column, column + digits), slice(first, first + nbytes), nbytes
            column += digits


def digits_to_bytes(digits: np.ndarray, size: int) -> np.ndarray:
    """Returns uint8 (rows, size): multiplies and adds, in limbs of 32 bits, lowest first."""
    limbs = np.zeros((len(digits), GROUP_BYTES // 4), np.uint64)
    for column in range(digits.shape[1] - 1, -1, -1):
        carry = digits[:, column].astype(np.uint64)
        for limb in range(limbs.shape[1]):
            carry += limbs[:, limb] * np.uint64(NUM_LEVELS)
            limbs[:, limb] = carry & np.uint64(0xFFFFFFFF)
            carry >>= np.uint64(LIMB_BITS)
    return limbs.astype("<u4").view(np.uint8)[:, :size]


def digits_of_bytes(packed: np.ndarray, digits: np.ndarray) -> None:
    """Divides and keeps remainders; bytes that were never written become digits, too."""
    whole = np.zeros((len(packed), GROUP_BYTES), np.uint8)
    whole[:, : packed.shape[1]] = packed
    limbs = whole.view("<u4").astype(np.uint64)
    for column in range(digits.shape[1]):
        rest = np.zeros(len(packed), np.uint64)
        for limb in range(limbs.shape[1] - 1, -1, -1):
            value = rest << np.uint64(LIMB_BITS) | limbs[:, limb]
            limbs[:, limb], rest = np.divmod(value, np.uint64(NUM_LEVELS))
        digits[:, column] = rest


def _bytes_for(digits: int) -> int:
    largest: int = NUM_LEVELS**digits - 1
    return -(-largest.bit_length() // 8)


def _eleven_levels(shape: StackShape) -> Pipeline:
    gain, rotation = HalfGain(shape, is_fitted=False), SignHadamard(shape)
    levels, coder = normal_levels(shape, NUM_LEVELS), Digits(shape)
    return Pipeline(shape, (), gain, (rotation,), levels, coder)
