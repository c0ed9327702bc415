"""``tq3`` and ``tq4``: rotate whole numbers, compare with thresholds, preserve the length.

1. x = the row in fp32, values below 2^-63 replaced by zero. norm = sqrt(sum x^2).
2. n = signs * x * (a power of two / norm, its last twelve bits cleared), rounded to whole numbers.
   z = H n; an element of z is about as large as that power of two (see ``rotation``).
3. code = the sign of z, and the number of Lloyd-Max bounds that its size reaches. Bounds are
   whole 64ths of the power of two (finer from five bits on) and z is rounded down to these; a
   negative v has size -1 - v.
4. scale = norm / sqrt(sum of level[code]^2), about the row's rms. It gives the unpacked row the
   length of the original, which the levels alone do not (norm correction). Stored as fp16.

Unpacking: +-level[code], also whole 64ths, the rotation back, times scale / sqrt(dim), signs.

All sums are of whole numbers, small enough for fp32: they are exact in any order, and kernels
compute them in 16 bits. The product in step 2 is exact too, since a row's values have at most
eleven bits. See ``docs/decisions/0039-whole-numbers-in-rows.md``.

A scale that fp16 cannot hold as a normal number (all-zero rows, rows of denormals, infinities,
NaN) is written as zero, and the row is stored unquantised. Together with the limit of 2^-63 this
keeps every denormal out of the arithmetic: threads that flush denormals to zero (a library built
with -ffast-math makes its whole process do so) get the same bytes, and no value makes it slow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.lloyd_max import gauss_table
from kvstore.codecs.rows.row_format import from_planes, to_planes

SMALLEST = np.float32(2.0**-63)
SPARE_BITS = 12  # cleared in a factor: its product with a 16-bit float is exact in fp32


@dataclass(frozen=True)
class RotatedRows:
    """``num_bits`` per value: a sign and ``num_bits - 1`` of magnitude.

    Implements ``RowFormat``.
    """

    num_bits: int

    @property
    def scale_dtype(self) -> np.dtype:
        return np.dtype("<u2")

    @property
    def one(self) -> int:
        """The whole number that stands for the rms of a row in ``levels`` and ``bounds``."""
        return 64 << min(max(self.num_bits - 4, 0), 3)

    @property
    def levels(self) -> np.ndarray:
        """The upper half of the levels, int32 (levels,), ascending."""
        return self._whole(gauss_table(1 << self.num_bits).levels)

    @property
    def bounds(self) -> np.ndarray:
        """The bounds between ``levels``, int32 (levels - 1,)."""
        return self._whole(gauss_table(1 << self.num_bits).bounds)

    def supports(self, dim: int) -> bool:
        return rotation.order_of(dim) is not None

    def packed_nbytes(self, dim: int) -> int:
        return self.num_bits * dim // 8

    def pack(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Rows with infinity or NaN are computed like all others; their scale becomes zero.
        with np.errstate(all="ignore"):
            x = np.where(np.abs(rows) < SMALLEST, np.float32(0), rows)
            norms = np.sqrt(rotation.squared_norms(x))
            whole = np.rint(x * factors_of(norms, rows.shape[1])[:, None])
            z = rotation.rotate(rotation.flip_signs(whole, rotation.sign_masks(rows.shape[1])))
            places = np.floor(z * np.float32(self.one / size_of(rows.shape[1])))
            magnitudes = self._magnitudes(places)
            scales = norms / self._lengths(magnitudes)
        codes = magnitudes | (places < 0).astype(np.uint8) << (self.num_bits - 1)
        return to_planes(codes, self.num_bits), floats.round_to_normal_fp16(scales)

    def unpack(self, packed: np.ndarray, scales: np.ndarray, dim: int) -> np.ndarray:
        codes = from_planes(packed, self.num_bits)
        levels = self.levels.astype(np.float32)
        z = rotation.rotate_back(np.concatenate([levels, -levels])[codes])
        units = floats.widen_normal_fp16(scales) * self.unit_of(dim)
        return rotation.flip_signs(z * units[:, None], rotation.sign_masks(dim))

    def are_all_packed(self, scales: np.ndarray) -> bool:
        # Values below the range wrap around to far above it.
        least = np.uint16(floats.FP16_SMALLEST_NORMAL)
        width = floats.FP16_INFINITY - floats.FP16_SMALLEST_NORMAL
        return bool((scales - least).max(initial=0) < width)

    def are_scales(self, scales: np.ndarray) -> bool:
        return bool(np.all((scales == 0) | floats.is_normal_fp16(scales)))

    def _magnitudes(self, places: np.ndarray) -> np.ndarray:
        sizes = np.where(places < 0, -1 - places, places)
        counts = np.zeros(sizes.shape, np.uint8)
        fast = compiled_stages()
        if fast is None:
            for bound in self.bounds:
                counts += sizes >= bound
            return counts
        between = (self.bounds - np.float32(0.5))[None].astype(np.float32)  # sizes are whole
        ones, first = np.ones(len(sizes), np.float32), np.zeros(len(sizes), np.int64)
        number = np.array([between.shape[1]])
        fast.quantise_levels(sizes, ones, first, between, number, counts)
        return counts

    def _lengths(self, magnitudes: np.ndarray) -> np.ndarray:
        """Return sqrt(sum of squared levels) of every row, fp32 (num_rows,)."""
        squares = np.array(squared_levels(self.num_bits), np.int32)
        energies = squares[magnitudes].sum(axis=1, dtype=np.int32).astype(np.float32)
        return np.sqrt(energies) * np.float32(1 / self.one)

    def unit_of(self, dim: int) -> np.float32:
        """Return the value of the whole number 1 in a row of scale 1."""
        return rotation.inverse_root(dim) / np.float32(self.one)

    def _whole(self, values: tuple[float, ...]) -> np.ndarray:
        one = self.one
        return np.array([round(value * one) for value in values], np.int32)


def size_of(dim: int) -> int:
    """Return the norm to which rows are scaled, so that every rotated number fits into 16 bits."""
    return 1 << (14 - (dim.bit_length() - 1) // 2)


def factors_of(norms: np.ndarray, dim: int) -> np.ndarray:
    """Return the factors that scale rows of these norms to ``size_of``, fp32 (num_rows,).

    ``norms``: fp32 (num_rows,).
    """
    bits = (np.float32(size_of(dim)) / norms).view(np.uint32)
    return (bits >> SPARE_BITS << SPARE_BITS).view(np.float32)


@functools.cache
def squared_levels(num_bits: int) -> tuple[int, ...]:
    """Return the squares of the upper half of the levels."""
    return tuple(int(level) ** 2 for level in RotatedRows(num_bits).levels)
