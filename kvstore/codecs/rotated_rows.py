"""``tq3`` and ``tq4``: rotate, compare with thresholds, keep the length right.

1. x = signs * the row in fp32, values below 2^-63 taken as zero. norm = sqrt(sum x^2).
2. z = H x; an element of z is about as large as ``norm`` (see ``rotation``).
3. code = how many of the Lloyd-Max bounds times ``norm`` lie below |z|, and the sign of z above
   it. The bounds are scaled, not the elements: no element is ever multiplied or divided.
4. scale = norm / sqrt(sum of level[code]^2), about the row's rms. It gives the unpacked row the
   length of the original, which the levels alone do not (norm correction). Kept as fp16.

Unpacking: +-level[code] * scale / sqrt(dim), the rotation back, signs.

A scale that fp16 cannot hold as a normal number (all-zero rows, rows of denormals, infinities,
NaN) is written as zero, and the row is kept as it is. Together with the cut at 2^-63 this keeps
every denormal out of the arithmetic: threads that flush them to zero (a library built with
-ffast-math does that to its whole process) get the same bytes, and none of it is slow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from kvstore.codecs import floats, packing, rotation
from kvstore.codecs.lloyd_max import GaussTable, gauss_table

SMALLEST = np.float32(2.0**-63)
ENERGY_UNIT = 2.0**-16  # squared levels are integers of it, so that they add up in any order


@dataclass(frozen=True)
class RotatedRows:
    """``num_bits`` per element: a sign and ``num_bits - 1`` of magnitude."""

    num_bits: int

    @property
    def scale_dtype(self) -> np.dtype:
        return np.dtype("<u2")

    @property
    def table(self) -> GaussTable:
        return gauss_table(1 << self.num_bits)

    def supports(self, dim: int) -> bool:
        return rotation.order_of(dim) is not None

    def packed_nbytes(self, dim: int) -> int:
        return self.num_bits * dim // 8

    def pack(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Infinite and undefined rows go through the same motions; their scale says so.
        with np.errstate(all="ignore"):
            x = rotation.flip_signs(rows, rotation.sign_masks(rows.shape[1]))
            x = np.where(np.abs(x) < SMALLEST, np.float32(0), x)
            norms = np.sqrt(rotation.squared_norms(x))
            z = rotation.rotate(x)
            magnitudes = self._magnitudes(np.abs(z), norms)
            scales = norms / self._lengths(magnitudes)
        codes = magnitudes | np.signbit(z).astype(np.uint8) << (self.num_bits - 1)
        return packing.to_planes(codes, self.num_bits), floats.round_to_normal_fp16(scales)

    def unpack(self, packed: np.ndarray, scales: np.ndarray, dim: int) -> np.ndarray:
        codes = packing.from_planes(packed, self.num_bits)
        negative = codes >> (self.num_bits - 1)
        magnitudes = codes & ((1 << (self.num_bits - 1)) - 1)
        units = floats.widen_normal_fp16(scales) * inverse_root(dim)
        sizes = self.table.level_array[None, :] * units[:, None]
        z = np.take_along_axis(sizes, magnitudes.astype(np.intp), axis=1)
        z = rotation.flip_signs(z, negative.astype(np.uint32) << 31)
        return rotation.flip_signs(rotation.rotate_back(z), rotation.sign_masks(dim))

    def are_scales(self, scales: np.ndarray) -> bool:
        if not len(scales) or floats.is_normal_fp16(np.array([scales.min(), scales.max()])).all():
            return True  # the usual case, and a quick one
        return bool(np.all((scales == 0) | floats.is_normal_fp16(scales)))

    def _magnitudes(self, sizes: np.ndarray, norms: np.ndarray) -> np.ndarray:
        counts = np.zeros(sizes.shape, np.uint8)
        for bound in self.table.bound_array:
            counts += sizes > (bound * norms)[:, None]
        return counts

    def _lengths(self, magnitudes: np.ndarray) -> np.ndarray:
        """sqrt(sum of squared levels) of every row."""
        squares = np.array(squared_levels(self.num_bits), np.int32)
        energies = squares[magnitudes].sum(axis=1, dtype=np.int32).astype(np.float32)
        lengths: np.ndarray = np.sqrt(energies) * np.float32(ENERGY_UNIT**0.5)
        return lengths


@functools.cache
def squared_levels(num_bits: int) -> tuple[int, ...]:
    """Squares of the levels in ``ENERGY_UNIT``."""
    levels = gauss_table(1 << num_bits).levels
    return tuple(round(level * level / ENERGY_UNIT) for level in levels)


def inverse_root(dim: int) -> np.float32:
    return np.float32(1 / np.sqrt(dim))
