"""Methods of the projects from which this one grew that are not in a paper of their own.

``manthan``, of ManthanQuant: eight Lloyd-Max levels of a normal variable, no rotation.
    Idea: a row over its norm is assumed to be normal without a rotation.
    Formula: code = level nearest to x sqrt(D) / |x|; the norm is fp32.
    Size: 3 + 32 / D bits, 5.12x over bf16 at D = 256, as the project says. Also known here as
    ``lm3``. Its cosine of 0.983 holds for channels of equal size. Those of real keys differ:
    perplexity rises by 636 % on SmolLM2.

``playground``, of turboQuantPlayground, after TurboQuant (arXiv 2504.19874) and KIVI (2402.02750).
    Idea: keys need the rotation, values do not. Its buffer of recent unquantised tokens is this
    store's raw tail: the tokens after the last whole chunk.
    Formula: keys as in ``turbo_quant``, values as in ``kivi``.
    Size: keys 3 + 16 / D bits, values 3 bits, unless parameters change them.

``base11``, of turboquant-mlx, after TurboQuant: eleven levels after signs and Hadamard.
    Idea: a number of levels that is not a power of two, for a size between 3 and 4 bits.
    Formula: codes are digits to base 11. The project packs two digits to a byte and calls that 3.5
    bits, but it is 4. As digits of one large number, 37 to 16 bytes, they really take 3.46.

``rvq``, of VeloxQuant: a residual quantiser of one to three bits per stage.
    Idea: after signs and Hadamard, the nearest of the best levels of a normal variable, then, in as
    many bits, a level of the error that it leaves. The error is assumed to be Laplacian, and its
    levels are the best ones of that variable. With one bit each, both levels are signs.
    Formula: x is restored as n_i + sqrt(e) l_j, where e is the mean squared error of the levels n;
    with one bit as s1 E|n| + s2 sqrt(1 - 2 / pi) / sqrt(2), with the signs s1 and s2.
    Size: 2 b + 16 / D bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.groups import GROUP, grouped
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines
from kvstore.codecs.literature.stages.levels import (
    SignHadamard,
    normal_levels,
    rotated,
    rotated_levels,
)
from kvstore.codecs.reader import Reader
from kvstore.codecs.rows.lloyd_max import gauss_error, gauss_table
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.codecs.rows.row_format import PlainRows
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import HalfGain

BASE = 11
BITS = math.log2(BASE)
GROUP_BYTES = 16
GROUP_DIGITS = 37  # as many as fit
LIMB_BITS = np.uint64(32)
LOW_LIMB = np.uint64(0xFFFFFFFF)
PART_DIGITS = 9  # as many as fit a limb: limbs are multiplied and divided by 11^9
POWERS = np.uint64(BASE) ** np.arange(PART_DIGITS + 1, dtype=np.uint64)


def manthan() -> Codec:
    """Make the preset ``manthan``."""
    return RowCodec("manthan.1", PlainRows())


def playground(key_bits: int = 3, value_bits: int = 2, group: int = GROUP) -> Codec:
    """Make the preset ``playground``."""
    keys = functools.partial(rotated_levels, num_bits=key_bits)
    values = functools.partial(grouped, bits=value_bits, along="width", group=group)
    least = (key_bits, value_bits)
    return StackCodec("playground.1", HeadPipelines(keys, values), least_bits=least)


def base11() -> Codec:
    """Make the preset ``base11``."""
    pipelines = HeadPipelines(_eleven_levels, _eleven_levels)
    return StackCodec("base11.1", pipelines, least_bits=(BITS, BITS))


def rvq(bits: int = 1) -> Codec:
    """Make the preset ``rvq`` with ``bits`` for each of its two stages."""
    rows = functools.partial(_two_stages, bits=bits)
    return StackCodec("rvq.1", HeadPipelines(rows, rows), least_bits=(2 * bits, 2 * bits))


def _eleven_levels(shape: StackShape) -> Pipeline:
    gain, rotation = HalfGain(shape, is_fitted=False), SignHadamard(shape)
    return Pipeline(shape, (), gain, (rotation,), normal_levels(shape, BASE), Digits(shape))


def _two_stages(shape: StackShape, bits: int) -> Pipeline:
    number = 1 << bits
    normal, missed = Levels(gauss_table(number).all_levels()), gauss_error(number) ** 0.5
    residual = Residual(normal, bits, Levels(laplace_levels(number)), missed)
    return rotated(shape, residual, 2 * bits)


class Digits:
    """Packs codes below 11 as digits of large numbers. Implements ``Coder``.

    Codes of a token are split into groups of 37, lowest first.
    """

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape
        starts = range(0, shape.width, GROUP_DIGITS)
        self._counts = [min(GROUP_DIGITS, shape.width - x) for x in starts]
        self.nbytes_of_row = sum(map(_bytes_for, self._counts))

    def write(self, codes: np.ndarray) -> bytes:
        rows = codes.reshape(-1, self._shape.width)
        packed = np.empty((len(rows), self.nbytes_of_row), np.uint8)
        for columns, places in self._slices():
            packed[:, places] = digits_to_bytes(rows[:, columns])[:, : places.stop - places.start]
        return packed.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        """Read codes; bytes that were never written become digits, too."""
        units, width = self._shape.num_units, self._shape.width
        packed = reader.take("u1", units * num_tokens, self.nbytes_of_row)
        codes = np.empty((len(packed), width), np.uint8)
        for columns, places in self._slices():
            digits_of_bytes(packed[:, places], codes[:, columns])
        return codes.reshape(units, num_tokens, width)

    def nbytes(self, num_tokens: int) -> int:
        return self._shape.num_units * num_tokens * self.nbytes_of_row

    def least_nbytes(self, num_tokens: int) -> int:
        return self.nbytes(num_tokens)

    def _slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield the columns and the bytes of every group."""
        column, first = 0, 0
        for count in self._counts:
            nbytes = _bytes_for(count)
            yield slice(column, column + count), slice(first, first + nbytes)
            column, first = column + count, first + nbytes


def digits_to_bytes(digits: np.ndarray) -> np.ndarray:
    """Return uint8 (rows, GROUP_BYTES): multiply and add, in limbs of 32 bits, lowest first."""
    limbs = np.zeros((GROUP_BYTES // 4, len(digits)), np.uint64)
    for first in reversed(range(0, digits.shape[1], PART_DIGITS)):
        part = digits[:, first : first + PART_DIGITS].astype(np.uint64)
        carry = part @ POWERS[: part.shape[1]]
        for limb in limbs:
            carry += limb * POWERS[-1]
            limb[:] = carry & LOW_LIMB
            carry >>= LIMB_BITS
    return np.ascontiguousarray(limbs.T, "<u4").view(np.uint8)


def digits_of_bytes(packed: np.ndarray, digits: np.ndarray) -> None:
    """Fill ``digits``, uint8 (rows, digits): divide and keep remainders."""
    whole = np.zeros((len(packed), GROUP_BYTES), np.uint8)
    whole[:, : packed.shape[1]] = packed
    limbs = whole.view("<u4").T.astype(np.uint64)
    for first in range(0, digits.shape[1], PART_DIGITS):
        rest = np.zeros(len(packed), np.uint64)
        for limb in limbs[::-1]:
            value = rest << LIMB_BITS | limb
            limb[:] = value // POWERS[-1]
            rest = value - limb * POWERS[-1]
        for column in range(first, min(first + PART_DIGITS, digits.shape[1])):
            quotient = rest // POWERS[1]
            digits[:, column] = rest - quotient * POWERS[1]
            rest = quotient


def _bytes_for(digits: int) -> int:
    return -(-(BASE**digits - 1).bit_length() // 8)


class Levels:
    """Takes the nearest of a few levels, the same for all components. Implements ``Quantiser``."""

    def __init__(self, levels: np.ndarray) -> None:
        """``levels``: floats (levels,), ascending."""
        self._levels = levels.astype(np.float32)
        self._bounds = (self._levels[1:] + self._levels[:-1]) / 2

    def quantise(self, components: np.ndarray) -> np.ndarray:
        codes = np.zeros(components.shape, np.uint8)
        for bound in self._bounds:
            codes += components > bound
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return self._levels[codes]


def laplace_levels(num_levels: int) -> np.ndarray:
    """Return the best levels of a Laplacian variable of unit variance, fp64 (num_levels,).

    Sullivan (1996): beyond any bound, an exponential variable is distributed as from zero on, so
    the best levels above the first are those of one level less. ``num_levels`` is even.
    """
    upper = np.ones(1)  # of an exponential variable of mean one
    while len(upper) < num_levels // 2:
        bound, last = float(upper[0]), 0.0
        while abs(bound - last) > 1e-12:  # half-way between the mean below it and the next level
            last, bound = bound, float(upper[0]) + 1 - bound / math.expm1(bound)
        upper = np.concatenate([[1 - bound / math.expm1(bound)], bound + upper])
    upper = upper / math.sqrt(2)
    return np.concatenate([-upper[::-1], upper])


class Residual:
    """Quantises the error that a first quantiser leaves. Implements ``Quantiser``.

    One integer holds both codes: the second above the first, ``first_bits`` each.
    """

    def __init__(self, first: Levels, first_bits: int, second: Levels, scale: float) -> None:
        """``scale``: the deviation of the first's error, for a second made for N(0, 1)."""
        self._first, self._second = first, second
        self._first_bits = first_bits
        self._scale = np.float32(scale)
        codes = np.arange(1 << 2 * first_bits)
        coarse = first.restore(codes & ((1 << first_bits) - 1))
        self._levels = coarse + second.restore(codes >> first_bits) * self._scale

    def quantise(self, components: np.ndarray) -> np.ndarray:
        coarse = self._first.quantise(components)
        missed = components - self._first.restore(coarse)
        fine = self._second.quantise(missed / self._scale)
        return coarse | fine << self._first_bits

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return self._levels[codes]
