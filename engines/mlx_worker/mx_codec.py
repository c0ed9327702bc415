"""``tq3`` and ``tq4`` as mlx operations, on whatever device mlx runs.

Every addition stands in the order that the definition in numpy has, so the bytes are the same. mlx
has the butterflies as one operation; where its order of additions is another one (a device's own
kernel may choose), ``butterflies="plain"`` spells them out.
"""

from __future__ import annotations

from typing import Final, Literal

import mlx.core as mx
import numpy as np

from engines.mlx_worker.live_rows import RowKind, Shared
from kvstore.codecs import floats, rotated_rows, rotation

Butterflies = Literal["fused", "plain"]

_BYTE: Final = 8  # elements whose bits make one byte of a plane


class MxRows(Shared):
    """Implements ``LiveRows``."""

    def __init__(self, kind: RowKind, butterflies: Butterflies = "fused") -> None:
        """Raises ``ValueError`` for a dimension without a Hadamard matrix."""
        order = rotation.order_of(kind.dim)
        if order is None:
            raise ValueError(f"no Hadamard matrix of order {kind.dim} is known here")
        self.kind = kind
        self._order = order
        self._fused = butterflies == "fused"
        table = kind.format.table
        levels = table.level_array
        self._bounds = [mx.array(bound) for bound in table.bound_array]
        self._levels = mx.array(np.concatenate([levels, -levels]))
        self._squares = mx.array(np.array(rotated_rows.squared_levels(kind.num_bits), np.int32))
        self._signs = mx.array(rotation.sign_masks(kind.dim))
        self._base = rotation.base_matrix(order.base)
        self._reversed = mx.array(_reversed_bits(order.power))
        self._places = mx.array((1 << np.arange(_BYTE)).astype(np.uint8))
        self._shifts = mx.arange(_BYTE, dtype=mx.uint8)
        # Evaluated: another thread may use what this one made.
        constants = [*self._bounds, self._levels, self._squares, self._signs, self._reversed]
        mx.eval(*constants, self._places, self._shifts)

    # ---- pack

    def pack(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        x = self.flip_signs(rows.astype(mx.float32))
        x = mx.where(mx.abs(x) < float(rotated_rows.SMALLEST), 0.0, x)
        norms = mx.sqrt(self._squared_norms(x))
        z = self.rotate(x)
        magnitudes = self._magnitudes(mx.abs(z), norms)
        scales = norms / self._lengths(magnitudes)
        negative = (z.view(mx.uint32) >> 31).astype(mx.uint8)
        codes = magnitudes | (negative << (self.kind.num_bits - 1))
        return self._to_planes(codes), _round_to_normal_fp16(scales)

    def _squared_norms(self, x: mx.array) -> mx.array:
        squares = x * x
        neighbours = squares[..., ::2] + squares[..., 1::2]
        num_places = max(self._order.power // 2, 1)
        groups = neighbours.reshape(*x.shape[:-1], -1, num_places)
        return _halving_sum(_halving_sum(groups)[..., None])[..., 0]

    def _magnitudes(self, sizes: mx.array, norms: mx.array) -> mx.array:
        counts = mx.zeros(sizes.shape, mx.uint8)
        for bound in self._bounds:
            counts = counts + (sizes > (bound * norms)[..., None]).astype(mx.uint8)
        return counts

    def _lengths(self, magnitudes: mx.array) -> mx.array:
        energies = mx.take(self._squares, magnitudes).sum(axis=-1).astype(mx.float32)
        return mx.sqrt(energies) * float(np.float32(rotated_rows.ENERGY_UNIT**0.5))

    def _to_planes(self, codes: mx.array) -> mx.array:
        groups = codes.reshape(*codes.shape[:-1], -1, _BYTE)
        planes = [
            (((groups >> bit) & 1) * self._places).sum(axis=-1).astype(mx.uint8)
            for bit in range(self.kind.num_bits)
        ]
        return mx.concatenate(planes, axis=-1)

    # ---- unpack

    def unpack(self, codes: mx.array, scales: mx.array) -> mx.array:
        y = self.flip_signs(self.rotate_back(self.rotated(codes, scales)))
        if self.kind.stored == "float16":
            y = mx.clip(y, -float(floats.FP16_LARGEST), float(floats.FP16_LARGEST))
        return y.astype(self.kind.dtype)

    def rotated(self, codes: mx.array, scales: mx.array) -> mx.array:
        """The rows as they lie in the rotated domain, fp32 (..., dim): levels times scale."""
        units = _widen_normal_fp16(scales) * float(rotated_rows.inverse_root(self.kind.dim))
        units = mx.where(scales == 0, 0.0, units)
        return mx.take(self._levels, self._from_planes(codes)) * units[..., None]

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
        """fp32 (..., dim) times the random signs."""
        return (x.view(mx.uint32) ^ self._signs).view(mx.float32)

    def rotate(self, x: mx.array) -> mx.array:
        """H x of fp32 (..., dim)."""
        groups = self._grouped(x)
        groups = self._fused_up(groups) if self._fused else _plain(groups, ascending=True)
        return self._multiply_base(groups, self._base).reshape(x.shape)

    def rotate_back(self, z: mx.array) -> mx.array:
        """H^T z of fp32 (..., dim)."""
        groups = self._multiply_base(self._grouped(z), self._base.T)
        if not self._fused:
            return _plain(groups, ascending=False).reshape(z.shape)
        # Largest distance first is smallest distance first on places with their bits reversed.
        turned = self._fused_up(mx.take(groups, self._reversed, axis=-1))
        return mx.take(turned, self._reversed, axis=-1).reshape(z.shape)

    def _grouped(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], self._order.base, self._order.power)

    def _fused_up(self, groups: mx.array) -> mx.array:
        return groups if self._order.power == 1 else mx.hadamard_transform(groups, scale=1.0)

    def _multiply_base(self, groups: mx.array, matrix: np.ndarray) -> mx.array:
        if len(matrix) == 1:
            return groups
        signs = mx.array(matrix)
        total = groups[..., :1, :] * signs[:, :1]
        for k in range(1, len(matrix)):
            total = total + groups[..., k : k + 1, :] * signs[:, k : k + 1]
        return total


def _plain(groups: mx.array, ascending: bool) -> mx.array:
    """The butterflies of the last axis, from the smallest distance up or from the largest down."""
    power = groups.shape[-1]
    distances = [1 << k for k in range(power.bit_length() - 1)]
    shape = groups.shape
    for distance in distances if ascending else reversed(distances):
        pairs = groups.reshape(*shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        groups = mx.stack([first + second, first - second], axis=-2).reshape(shape)
    return groups


def _reversed_bits(power: int) -> np.ndarray:
    """Where each place of a group goes when the bits of its number are reversed."""
    width = power.bit_length() - 1
    places = [int(f"{place:0{width}b}"[::-1], 2) if width else 0 for place in range(power)]
    return np.array(places, np.int32)


def _halving_sum(terms: mx.array) -> mx.array:
    """Sum over axis -2 in the order of ``rotation.halving_sum``."""
    while terms.shape[-2] % 2 == 0:
        half = terms.shape[-2] // 2
        terms = terms[..., :half, :] + terms[..., half:, :]
    total = terms[..., 0, :]
    for k in range(1, terms.shape[-2]):
        total = total + terms[..., k, :]
    return total


def _round_to_normal_fp16(values: mx.array) -> mx.array:
    """As ``floats.round_to_normal_fp16``."""
    bits = values.view(mx.uint32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - mx.array(floats.REBIAS, mx.uint32)
    smallest = mx.array(floats.FP16_SMALLEST_NORMAL, mx.uint32)
    normal = (rounded - smallest) < floats.FP16_INFINITY - floats.FP16_SMALLEST_NORMAL
    return mx.where(normal, rounded, 0).astype(mx.uint16)


def _widen_normal_fp16(bits: mx.array) -> mx.array:
    """As ``floats.widen_normal_fp16``."""
    return ((bits.astype(mx.uint32) + floats.REBIAS) << 13).view(mx.float32)
