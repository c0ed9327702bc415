"""Packs matrices of recurrent states, with a scale for each row.

``MatrixCodec``, the same bits for all rows:

    payload: scales, <u2 bf16 for each row | codes, row after row

A row lies along the last axis: in the state of a gated delta net or of Mamba-2, it is one row of a
head's matrix. Its scale is its largest value over the largest code, rounded up to bf16, so no code
is clipped; a code is value / scale, rounded to nearest even. Codes of 8 bits are bytes; codes of
fewer bits are bit planes, each plane of a row padded to whole bytes. With 16 bits there are no
scales, and values are rounded to bf16. numpy is the definition; its operations are exact or IEEE,
so bytes are the same everywhere.

``DealtCodec``, whose rows get more bits if errors in them cost more:

    payload: bits, u8 for each row | scales, <u2 bf16 for each row | codes of the rows of 2 bits,
    of those of 3, ... of those of 8, each as above

A row of zeros has no bits and no codes. A payload contains everything needed to read it. The values
learned from the model are only used to choose the bits of each row when it is written.

*How bits are chosen.* An error of a row's step, largest value / (2^(b - 1) - 1), costs

    cost_r(b) = weight_r * (largest_r / size)^2 * q(b),  q(b) = (2^(b - 1) - 1)^-2

with ``weight`` from ``learning.sensitivity``, relative to the size (root mean square) of the row's
matrix. To minimise the sum of costs for a sum of bits, each row gets one bit more as long as that
saves more than a *level*, which is the same for all rows of all layers: reverse water-filling
(Cover and Thomas, Elements of Information Theory, 10.3.3), in whole bits. No other choice of whole
bits is better, since each further bit reduces q by less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.codecs.catalogue import STATES
from kvstore.codecs.floats import narrow, round_to_bf16, to_stored, widen
from kvstore.codecs.reader import Reader
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import NUMPY_DTYPES, DType

ARITHMETIC: Final = 1  # raise it when bytes of ``MatrixCodec`` change
_BF16: Final = 16
DEALT_ARITHMETIC: Final = 1  # raise it when bytes of ``DealtCodec`` change
FEWEST, MOST = 2, 8  # bits of a row that is not all zero
UNKNOWN: Final = 8  # bits of all rows of an array for which nothing was learned
_COUNTS: Final = range(FEWEST, MOST + 1)
# The savings of one more bit: from 2 to 3, from 3 to 4 and so on.
_SAVED: Final = -np.diff([float((1 << (b - 1)) - 1) ** -2 for b in _COUNTS])
# The widest rows that ``DealtCodec`` packs. A payload's length does not bound the width that is
# claimed for it, since a row of zeros takes three bytes at any width.
MOST_WIDTH: Final = 512
MOST_NDIM: Final = 8
DEALT: Final = tuple(name for name, entry in STATES.items() if entry.learns)


@dataclass(frozen=True)
class MatrixCodec:
    """Packs matrices with the same bits for all rows. Stateless, thread-safe.

    ``num_bits``: of each code; 0 = arrays are left unpacked.
    """

    name: str
    num_bits: int

    @property
    def id(self) -> str:
        """The name and the version of the arithmetic, such as ``state8.1``."""
        return f"{self.name}.{ARITHMETIC}"

    @property
    def exact(self) -> bool:
        """True if arrays are left unpacked."""
        return not self.num_bits

    def takes(self, array: np.ndarray, dtype: str) -> bool:
        """Return whether the codec packs this array; one with infinities is stored exactly."""
        return not self.exact and is_finite(array, dtype)

    def encode(self, array: np.ndarray, dtype: str, number: int = 0) -> bytes:
        """Pack an array of any shape that it ``takes``.

        Args:
            dtype: the name of the dtype of its values.
            number: the index of the array in its state; ignored here.
        """
        values = fp32(array, dtype).reshape(-1, array.shape[-1])
        if self.num_bits == _BF16:
            return round_to_bf16(values).tobytes()
        stored, codes = scaled(values, self.num_bits)
        return stored.tobytes() + packed_codes(codes, self.num_bits)

    def decode(self, payload: memoryview, dtype: str, shape: Sequence[int]) -> np.ndarray:
        """Unpack into a new array of this shape, in the numpy dtype of ``dtype``.

        Raises:
            Corrupt: the payload does not have the length for this shape; nothing was allocated.
        """
        num_rows, width = rows_of_shape(dtype, shape)
        if len(payload) != self.nbytes(num_rows, width):
            raise Corrupt(f"{len(payload)} bytes are no packed state of shape {tuple(shape)}")
        reader = Reader(payload)
        if self.num_bits == _BF16:
            values = widen(reader.take("<u2", num_rows, width), "bfloat16")
        else:
            scales = widen(reader.take("<u2", num_rows), "bfloat16")
            with np.errstate(all="ignore"):  # a damaged scale; the result is refused
                values = read_codes(reader, num_rows, width, self.num_bits) * scales[:, None]
        return narrowed(values, dtype, shape)

    def nbytes(self, num_rows: int, width: int) -> int:
        """Return the bytes of a payload of ``num_rows`` rows of ``width`` values."""
        if self.num_bits == _BF16:
            return 2 * num_rows * width
        return num_rows * (2 + code_bytes(width, self.num_bits))


EXACT_STATES: Final = MatrixCodec("", 0)


def matrix_codec(name: str) -> MatrixCodec:
    """Return the codec of a name in ``catalogue.STATES``; "" leaves states unpacked.

    Raises:
        UnknownCodec: there is no such codec.
    """
    if not name:
        return EXACT_STATES
    if name not in STATES or STATES[name].learns:
        ways = ", ".join(x for x in STATES if not STATES[x].learns)
        raise UnknownCodec(f"no codec of states named {name!r}; there are {ways}")
    return MatrixCodec(name, STATES[name].bits)


# ---- functions that all codecs of matrices share


def scaled(values: np.ndarray, num_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales, bf16 bit patterns, and codes, int8, of fp32 (rows, width)."""
    largest = np.float32((1 << (num_bits - 1)) - 1)
    stored = _round_up_to_bf16(np.abs(values).max(1) / largest)
    scales = widen(stored, "bfloat16")[:, None]
    codes = np.rint(np.divide(values, scales, out=np.zeros_like(values), where=scales > 0))
    # A quotient with one of the smallest scales can be rounded beyond the largest code.
    return stored, np.clip(codes, -largest, largest).astype(np.int8)


def code_bytes(width: int, num_bits: int) -> int:
    """Count the bytes of a row's codes."""
    return width if num_bits == 8 else num_bits * -(-width // 8)


def packed_codes(codes: np.ndarray, num_bits: int) -> bytes:
    """Pack int8 codes (rows, width)."""
    if num_bits == 8:
        return codes.tobytes()
    raised = (codes + (1 << (num_bits - 1))).astype(np.uint8)
    planes = [np.packbits((raised >> bit) & 1, axis=1) for bit in range(num_bits)]
    return np.stack(planes, 1).tobytes()


def read_codes(reader: Reader, num_rows: int, width: int, num_bits: int) -> np.ndarray:
    """Read codes as fp32 (rows, width)."""
    if num_bits == 8:
        return reader.take("|i1", num_rows, width).astype(np.float32)
    planes = reader.take("|u1", num_rows, num_bits, -(-width // 8))
    raised = np.zeros((num_rows, width), np.uint8)
    for bit in range(num_bits):
        raised |= np.unpackbits(planes[:, bit], axis=1, count=width) << np.uint8(bit)
    return raised.astype(np.float32) - np.float32(1 << (num_bits - 1))


def rows_of_shape(dtype: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows and their width. Raises ``Corrupt`` for an impossible state."""
    if dtype not in NUMPY_DTYPES or not 0 < len(shape) <= MOST_NDIM or min(shape) < 1:
        raise Corrupt(f"no packed state has dtype {dtype} and shape {tuple(shape)}")
    return math.prod(shape[:-1]), shape[-1]


def narrowed(values: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return fp32 values in the numpy dtype of ``dtype``. Raises ``Corrupt`` for infinite ones."""
    if not np.isfinite(values).all():
        raise Corrupt("a packed state has infinite values")
    kind: DType = dtype  # type: ignore[assignment]  # ``rows_of_shape`` has checked it
    exact = values if dtype == "float32" else narrow(values, kind)
    return np.ascontiguousarray(exact).reshape(shape)


def is_finite(array: np.ndarray, dtype: str) -> bool:
    """Return whether an array has values of a dtype that can be packed, and all are finite."""
    if dtype not in NUMPY_DTYPES or not 0 < array.ndim <= MOST_NDIM or not array.size:
        return False
    return bool(np.isfinite(fp32(array, dtype)).all())


def fp32(array: np.ndarray, dtype: str) -> np.ndarray:
    """Widen values of any shape to fp32."""
    contiguous = np.ascontiguousarray(array)
    if dtype == "float32":
        return contiguous
    kind: DType = dtype  # type: ignore[assignment]  # ``takes`` has checked it
    return widen(to_stored(contiguous, kind), kind)


def _round_up_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 numbers >= 0 up to bf16; return bit patterns, uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    stored: np.ndarray = ((bits.astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    # Rounding up the largest fp32 values would give infinity.
    return np.minimum(stored, np.uint16(0x7F7F))


def relative_peaks(values: np.ndarray, num_rows: int) -> np.ndarray:
    """Return (largest value / size of its matrix)^2 of each row, float64.

    Args:
        values: fp32 (rows, width), the rows of one matrix after the other.
        num_rows: the number of rows of each matrix.
    """
    squares = np.square(values.astype(np.float64))
    sizes = squares.mean(1).reshape(-1, num_rows).mean(1).repeat(num_rows)
    peaks = squares.max(1)
    return np.divide(peaks, sizes, out=np.zeros_like(peaks), where=sizes > 0)


def dealt_bits(costs: np.ndarray, level: float) -> np.ndarray:
    """Return the bits of rows that are not all zero, uint8; ``costs``: weight * relative peak."""
    found: np.ndarray = FEWEST + (costs[:, None] * _SAVED > level).sum(1)
    return found.astype(np.uint8)


@dataclass(frozen=True, eq=False)
class DealtCodec:
    """Packs matrices with more bits for rows whose errors cost more. Thread-safe.

    Attributes:
        digits: digest of the learned values, which is part of the id.
        weights: fp32 (rows,) for each array of a state, in order.
        level: the least saving for which a row gets one more bit; see the head of this module.
    """

    name: str
    digits: str
    weights: Sequence[np.ndarray] = ()
    level: float = 0.0
    exact: bool = False

    @property
    def id(self) -> str:
        """The name, the version of the arithmetic, and digits of the learned values."""
        return f"{self.name}.{DEALT_ARITHMETIC}-{self.digits}"

    def takes(self, array: np.ndarray, dtype: str) -> bool:
        """Return whether the codec packs this array; one with infinities is stored exactly."""
        return is_finite(array, dtype) and array.shape[-1] <= MOST_WIDTH

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
        if len(payload) < 3 * num_rows or width > MOST_WIDTH:
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
                with np.errstate(all="ignore"):  # a damaged scale; the result is refused
                    codes = read_codes(reader, int(counts[count]), width, count)
                    values[own] = codes * scales[own, None]
        return narrowed(values, dtype, shape)

    def nbytes(self, num_rows: int, width: int) -> int:
        """Estimate the bytes of a payload of ``num_rows`` rows from the average number of bits."""
        return num_rows * (3 + code_bytes(width, STATES[self.name].bits))


def dealt_codec(name: str, learned: Mapping[str, np.ndarray] | None, digits: str) -> DealtCodec:
    """Return the codec of a name in ``catalogue.STATES`` that learns.

    Args:
        learned: the arrays of ``learning.sensitivity``; None = none, for reading or for a plan.
        digits: digest of these arrays.

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
