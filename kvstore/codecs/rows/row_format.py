"""The protocol of the arithmetic that packs one row, the packing of codes in bytes, and ``lm3``.

A row is one head's vector of one token: ``dim`` values of 16 bits. A row format turns it into a
fixed number of packed bytes and one scale, with numpy, in a fixed order of operations: that is the
definition. ``kernels`` does the same faster, and must give the same bytes.

Codes are packed as bit planes, or as one stream of three-bit numbers. Bit planes suit vector units:
a plane *is* the result of comparing a whole row with a threshold. The stream is the format of
ManthanQuant, one of the projects from which this one grew.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.codecs.rows.lloyd_max import gauss_table
from kvstore.codecs.rows.rotation import halving_sum, inverse_root


class RowFormat(Hashable, Protocol):
    """The arithmetic of one preset. Stateless; one instance per preset."""

    @property
    def scale_dtype(self) -> np.dtype:
        """The dtype of a row's scale, in the byte order of the payload."""

    def supports(self, dim: int) -> bool:
        """Return whether rows of ``dim`` values can be packed."""

    def packed_nbytes(self, dim: int) -> int:
        """Return the bytes of one row, without its scale."""

    def pack(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pack rows, fp32 (num_rows, dim), contiguous.

        Returns uint8 (num_rows, packed_nbytes) and scales (num_rows,). A scale of zero means that
        this row cannot be packed (all zero, infinite, NaN, or out of the scale's range) and has to
        be stored unquantised; its packed bytes have no meaning.
        """

    def unpack(self, packed: np.ndarray, scales: np.ndarray, dim: int) -> np.ndarray:
        """Unpack rows of ``pack`` to fp32 (num_rows, dim), not yet rounded to 16 bits."""

    def are_all_packed(self, scales: np.ndarray) -> bool:
        """Return whether every scale (num_rows,) is one that ``pack`` writes for a packed row.

        That is the usual case, and takes one pass over the scales instead of several.
        """

    def are_scales(self, scales: np.ndarray) -> bool:
        """Return whether every scale (num_rows,) is zero or one that ``pack`` can write."""


def to_planes(codes: np.ndarray, num_bits: int) -> np.ndarray:
    """Pack uint8 codes (num_rows, dim) to uint8 (num_rows, num_bits * dim / 8).

    The planes follow each other, lowest bit first; a byte's lowest bit is its lowest element.
    """
    planes = [np.packbits((codes >> bit) & 1, axis=1, bitorder="little") for bit in range(num_bits)]
    return np.concatenate(planes, axis=1)


def from_planes(packed: np.ndarray, num_bits: int) -> np.ndarray:
    """Unpack uint8 (num_rows, nbytes) of ``to_planes`` to uint8 codes (num_rows, dim)."""
    num_rows, nbytes = packed.shape
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    planes = bits.reshape(num_rows, num_bits, nbytes * 8 // num_bits)
    codes = planes[:, 0].copy()
    for bit in range(1, num_bits):
        codes |= planes[:, bit] << bit
    return codes


def to_stream(codes: np.ndarray) -> np.ndarray:
    """Pack three-bit codes, uint8 (num_rows, dim), to uint8 (num_rows, 3 * dim / 8).

    Code ``i`` occupies bits ``3 i .. 3 i + 2`` of a little-endian number.
    """
    bits = (codes[:, :, None] >> np.arange(3, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(len(codes), -1), axis=1, bitorder="little")


def from_stream(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 (num_rows, nbytes) of ``to_stream`` to uint8 codes (num_rows, dim)."""
    num_rows, nbytes = packed.shape
    bits = np.unpackbits(packed, axis=1, bitorder="little").reshape(num_rows, nbytes * 8 // 3, 3)
    return bits[:, :, 0] | bits[:, :, 1] << 1 | bits[:, :, 2] << 2


@dataclass(frozen=True)
class PlainRows:
    """``lm3``: the scheme of ManthanQuant, kept as the control. Implements ``RowFormat``.

    L2 norm, elements times sqrt(dim) / norm, the nearest of eight Lloyd-Max levels, three bits each
    in one little-endian stream, and the norm as fp32. There is no rotation: it suits rows whose
    channels are alike, and ruins real keys, whose channels are not. Measure against it; do not
    serve it.
    """

    @property
    def scale_dtype(self) -> np.dtype:
        return np.dtype("<f4")

    def supports(self, dim: int) -> bool:
        return dim > 0 and dim % 8 == 0

    def packed_nbytes(self, dim: int) -> int:
        return 3 * dim // 8

    def pack(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            norms = np.sqrt(halving_sum(rows * rows))
            units = norms * inverse_root(rows.shape[1])
            codes = np.zeros(rows.shape, np.uint8)
            for bound in gauss_table(8).all_bounds():
                codes += rows > (bound * units)[:, None]
        return to_stream(codes), np.where(_is_normal(norms), norms, np.float32(0))

    def unpack(self, packed: np.ndarray, scales: np.ndarray, dim: int) -> np.ndarray:
        units = scales * inverse_root(dim)
        return gauss_table(8).all_levels()[from_stream(packed)] * units[:, None]

    def are_all_packed(self, scales: np.ndarray) -> bool:
        return bool(np.all(_is_normal(scales)))

    def are_scales(self, scales: np.ndarray) -> bool:
        return bool(np.all((scales == 0) | _is_normal(scales)))


def _is_normal(norms: np.ndarray) -> np.ndarray:
    return (norms >= np.finfo(np.float32).tiny) & np.isfinite(norms)
