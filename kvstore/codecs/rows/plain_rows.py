"""``lm3``: the scheme of ManthanQuant, from which this project grew, kept as the control.

L2 norm, elements times sqrt(dim) / norm, the nearest of eight Lloyd-Max levels, three bits each in
one little-endian stream, and the norm as fp32. There is no rotation: it suits rows whose channels
are alike, and ruins real keys, whose channels are not. Measure against it; do not serve it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.rows.lloyd_max import gauss_table
from kvstore.codecs.rows.rotated_rows import inverse_root
from kvstore.codecs.rows.rotation import halving_sum
from kvstore.codecs.rows.row_format import from_stream, to_stream


@dataclass(frozen=True)
class PlainRows:
    """Three bits per value and an fp32 norm. Implements ``RowFormat``."""

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
            for bound in self._bounds():
                codes += rows > (bound * units)[:, None]
        return to_stream(codes), np.where(_is_normal(norms), norms, np.float32(0))

    def unpack(self, packed: np.ndarray, scales: np.ndarray, dim: int) -> np.ndarray:
        levels = gauss_table(8).level_array
        ascending = np.concatenate([-levels[::-1], levels])
        units = scales * inverse_root(dim)
        return ascending[from_stream(packed)] * units[:, None]

    def are_all_packed(self, scales: np.ndarray) -> bool:
        return bool(np.all(_is_normal(scales)))

    def are_scales(self, scales: np.ndarray) -> bool:
        return bool(np.all((scales == 0) | _is_normal(scales)))

    def _bounds(self) -> np.ndarray:
        bounds = gauss_table(8).bound_array
        return np.concatenate([-bounds[::-1], np.zeros(1, np.float32), bounds])


def _is_normal(norms: np.ndarray) -> np.ndarray:
    return (norms >= np.finfo(np.float32).tiny) & np.isfinite(norms)
