"""Packs matrices of recurrent states; rows get bits by the cost of errors in them.

    payload: bits, u8 for each row | scales, <u2 bf16 for each row | codes of the rows of 2 bits,
    of those of 3, ... of those of 8, each as in ``matrices``

A row of zeros has no bits and no codes. A payload contains everything needed to read it; the values
learned from the model only decide how bits are dealt when it is written.

*How they are dealt.* An error of a row's step, largest value / (2^(b - 1) - 1), costs

    cost_r(b) = weight_r * (largest_r / size)^2 * q(b),  q(b) = (2^(b - 1) - 1)^-2

with ``weight`` from ``learning.state_sensitivity``, relative to the size (root mean square) of the
row's matrix. To minimise the sum of costs for a sum of bits, each row gets one bit more as long as
that saves more than a *level*, which is the same for all rows of all layers: reverse water-filling
(Cover and Thomas, Elements of Information Theory, 10.3.3), in whole bits. No other choice of whole
bits is better, since each further bit reduces q by less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.codecs.floats import widen
from kvstore.codecs.reader import Reader
from kvstore.codecs.states.matrices import (
    code_bytes,
    fp32,
    is_finite,
    narrowed,
    packed_codes,
    read_codes,
    rows_of_shape,
    scaled,
)
from kvstore.codecs.states.ways import STATES
from kvstore.errors import Corrupt, UnknownCodec

ARITHMETIC: Final = 1  # raise it when bytes change
FEWEST, MOST = 2, 8  # bits of a row that is not all zero
UNKNOWN: Final = 8  # bits of all rows of an array for which nothing was learned
_COUNTS: Final = range(FEWEST, MOST + 1)
# The savings of one more bit: from 2 to 3, from 3 to 4 and so on.
_SAVED: Final = -np.diff([float((1 << (b - 1)) - 1) ** -2 for b in _COUNTS])


def relative_peaks(values: np.ndarray, num_rows: int) -> np.ndarray:
    """Return (largest value / size of its matrix)^2 of each row, float64.

    Args:
        values: fp32 (rows, width), the rows of one matrix after the other.
        num_rows: the number of rows of each matrix.
    """
    squares = np.square(values.astype(np.float64))
    sizes = squares.mean(1).reshape(-1, num_rows).mean(1).repeat(num_rows)
    peaks = squares.max(1)
    found: np.ndarray = np.divide(peaks, sizes, out=np.zeros_like(peaks), where=sizes > 0)
    return found


def dealt_bits(costs: np.ndarray, level: float) -> np.ndarray:
    """Return the bits of rows that are not all zero, uint8; ``costs``: weight * relative peak."""
    found: np.ndarray = FEWEST + (costs[:, None] * _SAVED > level).sum(1)
    return found.astype(np.uint8)


@dataclass(frozen=True, eq=False)
class DealtCodec:
    """Packs one array at a time. Thread-safe.

    Attributes:
        digits: digest of the learned values, in its id.
        weights: fp32 (rows,) for each array of a state, in order.
        level: the least saving for which a row gets one more bit; see above.
    """

    name: str
    digits: str
    weights: Sequence[np.ndarray] = ()
    level: float = 0.0
    exact: bool = False

    @property
    def id(self) -> str:
        """The name, the version of the arithmetic, and digits of the learned values."""
        return f"{self.name}.{ARITHMETIC}-{self.digits}"

    def takes(self, array: np.ndarray, dtype: str) -> bool:
        """Return whether it can pack this array; one with infinities is better kept unpacked."""
        return is_finite(array, dtype)

    def encode(self, array: np.ndarray, dtype: str, number: int = 0) -> bytes:
        """Pack an array that it ``takes``; ``number``: the index of the array in its state."""
        values = fp32(array, dtype).reshape(-1, array.shape[-1])
        bits = self._bits(values, array.shape[-2] if array.ndim > 1 else 1, number)
        scales, codes = np.zeros(len(values), np.uint16), []
        for count in _COUNTS:
            own = bits == count
            if own.any():
                scales[own], coded = scaled(values[own], count)
                codes.append(packed_codes(coded, count))
        return b"".join([bits.tobytes(), scales.tobytes(), *codes])

    def _bits(self, values: np.ndarray, num_rows: int, number: int) -> np.ndarray:
        bits = np.full(len(values), UNKNOWN, np.uint8)
        if number < len(self.weights) and len(self.weights[number]) == len(values):
            costs = self.weights[number].astype(np.float64) * relative_peaks(values, num_rows)
            bits = dealt_bits(costs, self.level)
        bits[~values.any(1)] = 0
        return bits

    def decode(self, payload: memoryview, dtype: str, shape: Sequence[int]) -> np.ndarray:
        """Unpack into a new array of this shape, in the numpy dtype of ``dtype``.

        Raises:
            Corrupt: the payload does not have the length for this shape and its own bits; until
                then, no more is allocated than the payload has rows.
        """
        num_rows, width = rows_of_shape(dtype, shape)
        if len(payload) < 3 * num_rows:
            raise Corrupt(f"{len(payload)} bytes are no packed state of shape {tuple(shape)}")
        reader = Reader(payload)
        bits = reader.take("|u1", num_rows)
        counts = np.bincount(bits, minlength=MOST + 1)
        length = sum(int(counts[b]) * code_bytes(width, b) for b in _COUNTS)
        if counts[1] or len(counts) > MOST + 1 or len(payload) != 3 * num_rows + length:
            raise Corrupt(f"{len(payload)} bytes are no packed state of shape {tuple(shape)}")
        scales = widen(reader.take("<u2", num_rows), "bfloat16")
        values = np.zeros((num_rows, width), np.float32)
        for count in _COUNTS:
            if counts[count]:
                own = bits == count
                with np.errstate(over="ignore"):  # by a damaged scale; the result is refused
                    codes = read_codes(reader, int(counts[count]), width, count)
                    values[own] = codes * scales[own, None]
        return narrowed(values, dtype, shape)

    def nbytes(self, num_rows: int, width: int) -> int:
        """Return the bytes of a payload of so many rows, with the usual average of bits."""
        return num_rows * (3 + code_bytes(width, STATES[self.name].bits))


def dealt_codec(name: str, learned: Mapping[str, np.ndarray] | None, digits: str) -> DealtCodec:
    """Return the codec of a name in ``ways.STATES`` that learns.

    Args:
        learned: the arrays of ``learning.state_sensitivity``; None = nothing, as for a plan.
        digits: digest of these.

    Raises:
        UnknownCodec: another release learned these arrays.
    """
    if learned is None:
        return DealtCodec(name, digits)
    try:
        weights = [learned[f"weights{x}"] for x in range(len(learned) - 1)]
        level = float(learned["levels"][list(DEALT).index(name)])
    except (KeyError, IndexError) as error:
        raise UnknownCodec(f"states were learned by another release ({error})") from error
    if any(x.dtype != np.float32 or x.ndim != 1 for x in weights):
        raise UnknownCodec("states were learned by another release")
    return DealtCodec(name, digits, weights, level)


DEALT: Final = tuple(name for name, entry in STATES.items() if entry.learns)
