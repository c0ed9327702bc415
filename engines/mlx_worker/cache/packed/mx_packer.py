"""Packs ``tq3`` and ``tq4`` by mlx operations, on every device that mlx has.

Squares are added in the same order as in the definition in numpy, and sums of integers do not
depend on the order, so the bytes are the same. mlx has the butterflies as one operation; if a
device's kernel for it is not exact, ``butterflies="plain"`` computes them step by step.
"""

from __future__ import annotations

from typing import Final, Literal

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.rows import NeverCopied, RowKind
from kvstore.codecs import floats
from kvstore.codecs.rows import rotated_rows, rotation

Butterflies = Literal["fused", "plain"]

_BYTE: Final = 8  # elements whose bits make one byte of a plane


class MlxRowPacker(NeverCopied):
    """A ``RowPacker`` for every device."""

    def __init__(self, kind: RowKind, butterflies: Butterflies = "fused") -> None:
        """Raises ``ValueError`` for a dimension without a Hadamard matrix."""
        order = rotation.order_of(kind.dim)
        if order is None:
            raise ValueError(f"no Hadamard matrix of order {kind.dim} is known here")
        self.kind = kind
        self._order = order
        self._fused = butterflies == "fused"
        levels = kind.format.levels.astype(np.float32)
        self._bounds = [mx.array(bound) for bound in kind.format.bounds.astype(np.float32)]
        self._levels = mx.array(np.concatenate([levels, -levels]))
        self._size = rotated_rows.size_of(kind.dim)
        self._squares = mx.array(np.array(rotated_rows.squared_levels(kind.num_bits), np.int32))
        self._signs = mx.array(rotation.sign_masks(kind.dim))
        self._base = rotation.base_matrix(order.base)
        self._bit_values = mx.array((1 << np.arange(_BYTE)).astype(np.uint8))
        self._shifts = mx.arange(_BYTE, dtype=mx.uint8)
        # Evaluated here, since another thread may use these arrays.
        constants = [*self._bounds, self._levels, self._squares, self._signs]
        mx.eval(*constants, self._bit_values, self._shifts)

    # ---- pack

    def pack(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        x = rows.astype(mx.float32)
        x = mx.where(mx.abs(x) < float(rotated_rows.SMALLEST), 0.0, x)
        norms = mx.sqrt(self._squared_norms(x))
        whole = mx.round(x * self._factors(norms)[..., None])
        z = self.rotate(self.flip_signs(whole))
        cells = mx.floor(z * (self.kind.format.one / self._size))
        magnitudes = self._magnitudes(cells)
        scales = norms / self._lengths(magnitudes)
        negative = (cells < 0).astype(mx.uint8)
        codes = magnitudes | (negative << (self.kind.num_bits - 1))
        return self._to_planes(codes), _round_to_normal_fp16(scales)

    def _factors(self, norms: mx.array) -> mx.array:
        bits = (float(self._size) / norms).view(mx.uint32)
        spare = rotated_rows.SPARE_BITS
        return ((bits >> spare) << spare).view(mx.float32)

    def _squared_norms(self, x: mx.array) -> mx.array:
        squares = x * x
        neighbours = squares[..., ::2] + squares[..., 1::2]
        num_groups = max(self._order.power // 2, 1)
        groups = neighbours.reshape(*x.shape[:-1], -1, num_groups)
        return _halving_sum(_halving_sum(groups)[..., None])[..., 0]

    def _magnitudes(self, cells: mx.array) -> mx.array:
        sizes = mx.where(cells < 0, -1 - cells, cells)
        counts = mx.zeros(sizes.shape, mx.uint8)
        for bound in self._bounds:
            counts = counts + (sizes >= bound).astype(mx.uint8)
        return counts

    def _lengths(self, magnitudes: mx.array) -> mx.array:
        energies = mx.take(self._squares, magnitudes).sum(axis=-1).astype(mx.float32)
        return mx.sqrt(energies) * (1 / self.kind.format.one)

    def _to_planes(self, codes: mx.array) -> mx.array:
        groups = codes.reshape(*codes.shape[:-1], -1, _BYTE)
        planes = [
            (((groups >> bit) & 1) * self._bit_values).sum(axis=-1).astype(mx.uint8)
            for bit in range(self.kind.num_bits)
        ]
        return mx.concatenate(planes, axis=-1)

    # ---- unpack

    def unpack(self, codes: mx.array, scales: mx.array) -> mx.array:
        z, units = self.levels_and_units(codes, scales)
        y = self.flip_signs(self.rotate_back(z) * units[..., None])
        if self.kind.stored == "float16":
            y = mx.clip(y, -float(floats.FP16_LARGEST), float(floats.FP16_LARGEST))
        return y.astype(self.kind.dtype)

    def levels_and_units(self, codes: mx.array, scales: mx.array) -> tuple[mx.array, mx.array]:
        """Return the levels of rows, still rotated, fp32 (..., dim), and the value of a level of 1.

        The values are fp32 (...), one per row.
        """
        units = _widen_normal_fp16(scales) * float(self.kind.format.unit_of(self.kind.dim))
        units = mx.where(scales == 0, 0.0, units)
        return mx.take(self._levels, self._from_planes(codes)), units

    def _from_planes(self, packed: mx.array) -> mx.array:
        bits = self.kind.num_bits
        planes = packed.reshape(*packed.shape[:-1], bits, self.kind.dim // _BYTE, 1)
        ones = (planes >> self._shifts) & 1
        codes = ones[..., 0, :, :]
        for bit in range(1, bits):
            codes = codes | (ones[..., bit, :, :] << bit)
        return codes.reshape(*packed.shape[:-1], self.kind.dim)

    # ---- the rotation

    def flip_signs(self, x: mx.array) -> mx.array:
        """Multiply fp32 (..., dim) by the random signs."""
        return (x.view(mx.uint32) ^ self._signs).view(mx.float32)

    def rotate(self, x: mx.array) -> mx.array:
        """Multiply fp32 (..., dim) by the Hadamard matrix H."""
        groups = self._grouped(x)
        return self._multiply_base(self._butterflies(groups), self._base).reshape(x.shape)

    def rotate_back(self, z: mx.array) -> mx.array:
        """Multiply fp32 (..., dim) by the transpose of H."""
        groups = self._multiply_base(self._grouped(z), self._base.T)
        return self._butterflies(groups).reshape(z.shape)

    def _grouped(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], self._order.base, self._order.power)

    def _butterflies(self, groups: mx.array) -> mx.array:
        if not self._fused:
            return _plain(groups)
        return groups if self._order.power == 1 else mx.hadamard_transform(groups, scale=1.0)

    def _multiply_base(self, groups: mx.array, matrix: np.ndarray) -> mx.array:
        if len(matrix) == 1:
            return groups
        signs = mx.array(matrix)
        total = groups[..., :1, :] * signs[:, :1]
        for k in range(1, len(matrix)):
            total = total + groups[..., k : k + 1, :] * signs[:, k : k + 1]
        return total


def _plain(groups: mx.array) -> mx.array:
    """Return the butterflies of the last axis, computed step by step."""
    power = groups.shape[-1]
    shape = groups.shape
    for distance in (1 << k for k in range(power.bit_length() - 1)):
        pairs = groups.reshape(*shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        groups = mx.stack([first + second, first - second], axis=-2).reshape(shape)
    return groups


def _halving_sum(terms: mx.array) -> mx.array:
    """Return the sum over axis -2, added in the order of ``rotation.halving_sum``."""
    while terms.shape[-2] % 2 == 0:
        half = terms.shape[-2] // 2
        terms = terms[..., :half, :] + terms[..., half:, :]
    total = terms[..., 0, :]
    for k in range(1, terms.shape[-2]):
        total = total + terms[..., k, :]
    return total


def _round_to_normal_fp16(values: mx.array) -> mx.array:
    """Round as ``floats.round_to_normal_fp16`` does."""
    bits = values.view(mx.uint32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - mx.array(floats.REBIAS, mx.uint32)
    smallest = mx.array(floats.FP16_SMALLEST_NORMAL, mx.uint32)
    normal = (rounded - smallest) < floats.FP16_INFINITY - floats.FP16_SMALLEST_NORMAL
    return mx.where(normal, rounded, 0).astype(mx.uint16)


def _widen_normal_fp16(bits: mx.array) -> mx.array:
    """Widen as ``floats.widen_normal_fp16`` does."""
    return ((bits.astype(mx.uint32) + floats.REBIAS) << 13).view(mx.float32)
