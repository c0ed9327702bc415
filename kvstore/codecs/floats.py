"""Sixteen-bit floats by integer operations, the same on every machine.

A lossy codec works on rows of 16-bit values: bf16 (values of an fp32 cache are first rounded to it)
or fp16 where the engine's cache is fp16. Both widen to fp32 without loss. numpy has no bf16, so its
values are passed as uint16 bit patterns; see ``kvstore.shapes``.
"""

from __future__ import annotations

import numpy as np

from kvstore.shapes import DType

FP16_LARGEST = np.float32(65504)
# The exponent biases of fp32 and fp16 differ by 112, here at fp16's place: a normal fp16 is an fp32
# that is shifted right by 13 bits, less this.
REBIAS = 112 << 10
FP16_SMALLEST_NORMAL = 1 << 10  # bit patterns
FP16_INFINITY = 31 << 10


def to_stored(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the bit patterns in which rows are stored: bf16, or fp16 for an fp16 cache.

    ``values``: any shape and strides, in the numpy dtype of ``dtype``. Returns uint16 of that
    shape.
    """
    if dtype == "float32":
        return round_to_bf16(values)
    return values.view(np.uint16)


def widen(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the fp32 values of uint16 bit patterns made by ``to_stored``; any shape."""
    if dtype == "float16":
        return stored.view(np.float16).astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def from_stored(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Return uint16 bit patterns of ``to_stored`` in the engine's dtype; any shape."""
    if dtype == "float32":
        return widen(stored, dtype)
    return stored.view(np.float16) if dtype == "float16" else stored


def narrow(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Round finite fp32 values to the precision of stored rows, in the engine's dtype.

    Keeps the shape, which may be any. fp16 saturates: a new infinity would turn attention into NaN.
    """
    if dtype == "float16":
        clipped: np.ndarray = np.clip(values, -FP16_LARGEST, FP16_LARGEST)
        return clipped.astype(np.float16)
    return from_stored(round_to_bf16(values), dtype)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 values to uint16 bit patterns of bf16, to nearest even; a NaN stays a NaN."""
    bits: np.ndarray = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def limited_to_fp16(values: np.ndarray) -> np.ndarray:
    """Round floats of any shape to fp16, little-endian; beyond its range is its largest value."""
    return np.clip(values, -FP16_LARGEST, FP16_LARGEST).astype("<f2")


def round_to_normal_fp16(values: np.ndarray) -> np.ndarray:
    """Round positive fp32 values to uint16 bit patterns of fp16, to nearest even.

    Values that are not normal in fp16 become zero.
    """
    bits = values.view(np.uint32)
    # uint32 arithmetic wraps, so values below the range of normal numbers end far above it.
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - np.uint32(REBIAS)
    normal = (rounded - np.uint32(FP16_SMALLEST_NORMAL)) < FP16_INFINITY - FP16_SMALLEST_NORMAL
    return np.where(normal, rounded, 0).astype(np.uint16)


def widen_normal_fp16(bits: np.ndarray) -> np.ndarray:
    """Return the fp32 values of nonzero uint16 patterns of ``round_to_normal_fp16``."""
    return ((bits.astype(np.uint32) + np.uint32(REBIAS)) << 13).view(np.float32)


def is_normal_fp16(bits: np.ndarray) -> np.ndarray:
    """Return for each uint16 bit pattern whether it is a positive normal fp16.

    The result is bool, of the same shape.
    """
    return (bits >= FP16_SMALLEST_NORMAL) & (bits < FP16_INFINITY)
