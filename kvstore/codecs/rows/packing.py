"""Packs small codes into bytes: bit planes, or one stream of three-bit numbers.

Bit planes suit vector units: a plane *is* the result of comparing a whole row with a threshold. The
stream is the format of ManthanQuant, one of the projects from which this one grew.
"""

from __future__ import annotations

import numpy as np


def to_planes(codes: np.ndarray, num_bits: int) -> np.ndarray:
    """Packs uint8 codes (num_rows, dim) to uint8 (num_rows, num_bits * dim / 8).

    The planes follow each other, lowest bit first; a byte's lowest bit is its lowest element.
    """
    planes = [np.packbits((codes >> bit) & 1, axis=1, bitorder="little") for bit in range(num_bits)]
    return np.concatenate(planes, axis=1)


def from_planes(packed: np.ndarray, num_bits: int) -> np.ndarray:
    """Unpacks uint8 (num_rows, nbytes) of ``to_planes`` to uint8 codes (num_rows, dim)."""
    num_rows, nbytes = packed.shape
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    planes = bits.reshape(num_rows, num_bits, nbytes * 8 // num_bits)
    codes = planes[:, 0].copy()
    for bit in range(1, num_bits):
        codes |= planes[:, bit] << bit
    return codes


def to_stream(codes: np.ndarray) -> np.ndarray:
    """Packs three-bit codes, uint8 (num_rows, dim), to uint8 (num_rows, 3 * dim / 8).

    Code ``i`` occupies bits ``3 i .. 3 i + 2`` of a little-endian number.
    """
    bits = (codes[:, :, None] >> np.arange(3, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(len(codes), -1), axis=1, bitorder="little")


def from_stream(packed: np.ndarray) -> np.ndarray:
    """Unpacks uint8 (num_rows, nbytes) of ``to_stream`` to uint8 codes (num_rows, dim)."""
    num_rows, nbytes = packed.shape
    bits = np.unpackbits(packed, axis=1, bitorder="little").reshape(num_rows, nbytes * 8 // 3, 3)
    return bits[:, :, 0] | bits[:, :, 1] << 1 | bits[:, :, 2] << 2
