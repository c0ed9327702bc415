"""Matrices of recurrent states in few bits, with a scale for each row.

    payload: scales, <u2 bf16 for each row | codes, row after row

A row lies along the last axis: in the state of a gated delta net or of Mamba-2, it is one row of a
head's matrix. Its scale is its largest value over the largest code, rounded up to bf16, so no code
is clipped; a code is value / scale, rounded to nearest even. Codes of 8 bits are bytes; codes of
fewer bits are bit planes, each plane of a row padded to whole bytes. With 16 bits there are no
scales, and values are rounded to bf16. numpy is the definition; its operations are exact or IEEE,
so bytes are the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.codecs.floats import narrow, round_to_bf16, to_stored, widen
from kvstore.codecs.reader import Reader
from kvstore.codecs.states.ways import STATES
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import NUMPY_DTYPES, DType

ARITHMETIC: Final = 1  # raise it when bytes change
_BF16: Final = 16


@dataclass(frozen=True)
class MatrixCodec:
    """Packs one array at a time. Stateless, thread-safe. ``num_bits``: of a code; 0 = exact."""

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
        """Return whether it can pack this array; one with infinities is better kept unpacked."""
        return not self.exact and is_finite(array, dtype)

    def encode(self, array: np.ndarray, dtype: str, number: int = 0) -> bytes:
        """Pack an array of any shape that it ``takes``.

        Args:
            dtype: the name of the dtype of its values.
            number: the index of the array in its state; ignored, since all are packed alike here.
        """
        values = fp32(array, dtype).reshape(-1, array.shape[-1])
        if self.num_bits == _BF16:
            return round_to_bf16(values).tobytes()
        stored, codes = scaled(values, self.num_bits)
        return stored.tobytes() + packed_codes(codes, self.num_bits)

    def decode(self, payload: memoryview, dtype: str, shape: Sequence[int]) -> np.ndarray:
        """Unpack into a new array of this shape, in the numpy dtype of ``dtype``.

        Raises:
            Corrupt: the payload does not have the length for this shape; nothing is allocated
                then.
        """
        num_rows, width = rows_of_shape(dtype, shape)
        if len(payload) != self.nbytes(num_rows, width):
            raise Corrupt(f"{len(payload)} bytes are no packed state of shape {tuple(shape)}")
        reader = Reader(payload)
        if self.num_bits == _BF16:
            values = widen(reader.take("<u2", num_rows, width), "bfloat16")
        else:
            scales = widen(reader.take("<u2", num_rows), "bfloat16")
            with np.errstate(over="ignore"):  # by a damaged scale; the result is refused
                values = read_codes(reader, num_rows, width, self.num_bits) * scales[:, None]
        return narrowed(values, dtype, shape)

    def nbytes(self, num_rows: int, width: int) -> int:
        """Return the bytes of a payload of so many rows of ``width`` values."""
        if self.num_bits == _BF16:
            return 2 * num_rows * width
        return num_rows * (2 + code_bytes(width, self.num_bits))


EXACT_STATES: Final = MatrixCodec("", 0)


def matrix_codec(name: str) -> MatrixCodec:
    """Return the codec of a name in ``ways.STATES``; "" leaves states unpacked.

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
    if dtype not in NUMPY_DTYPES or not shape or min(shape) < 1:
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
    if dtype not in NUMPY_DTYPES or not array.ndim or not array.size:
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
    """Return bf16 bit patterns, uint16, of numbers >= 0: the smallest that is not less."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    stored: np.ndarray = ((bits.astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    # Rounding up the largest fp32 values would give infinity.
    finite: np.ndarray = np.minimum(stored, np.uint16(0x7F7F))
    return finite
