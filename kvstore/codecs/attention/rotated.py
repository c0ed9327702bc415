"""Products with queries, and weighted sums, of rows as ``rows.rotated_rows`` packs them.

A row is restored as ``unit S H^T level[code]``. So

    q . row             = unit (H S q) . level[code]          the query is rotated, once
    sum of weight row   = S H^T sum of weight unit level[code]  the sum is rotated back, once

and no row is ever restored. The rotation costs as much as restoring one row, however many rows
there are. A row whose scale is zero counts as a row of zeros. Sums are in fp32, so their last bits
depend on the order of addition; up to those bits, values equal those of restored rows.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.loops.compiled import compiled_module
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_format import from_planes

logger = logging.getLogger(__name__)

KERNELS: Final = "kvstore.codecs.kernels.rows.numba_attention"
SOME_TOKENS = 263  # that are compared: no multiple of a tile
TOLERANCE = 1e-4  # times the largest value: the allowed difference of compiled code from numpy


class RowAttention(Protocol):
    """Attends to rows of one format and length. Stateless and thread-safe."""

    def scores(
        self, query: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        """Writes the product of every query with every row of its head to ``out``.

        ``query``: fp32 (heads, queries, dim). ``codes``: uint8 (heads, tokens, row_nbytes), rows
        side by side. ``scales``: uint16 (heads, tokens). ``out``: fp32 (heads, queries, tokens).
        The last axis of each is contiguous.
        """

    def add_weighted(
        self, weights: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        """Adds weighted sums of the rows of each head to ``out``, fp32 (heads, queries, dim).

        ``weights``: fp32 (heads, queries, tokens); the other arguments are as for ``scores``.
        """


@dataclass(frozen=True)
class ReferenceAttention:
    """The definition, in numpy. Implements ``RowAttention``."""

    rows: RotatedRows
    dim: int

    def scores(
        self, query: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        levels = self._levels(codes, scales)
        np.matmul(self._rotated(query), levels.swapaxes(1, 2), out=out)

    def add_weighted(
        self, weights: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        sums = np.matmul(weights, self._levels(codes, scales)).reshape(-1, self.dim)
        signs = rotation.sign_masks(self.dim)
        out += rotation.flip_signs(rotation.rotate_back(sums), signs).reshape(out.shape)

    def _rotated(self, query: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(query, np.float32).reshape(-1, self.dim)
        signed = rotation.flip_signs(flat, rotation.sign_masks(self.dim))
        return rotation.rotate(signed).reshape(query.shape)

    def _levels(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Returns rows before their rotation, fp32 (heads, tokens, dim)."""
        levels = self.rows.levels.astype(np.float32)
        flat = np.ascontiguousarray(codes).reshape(-1, codes.shape[2])
        numbers = from_planes(flat, self.rows.num_bits)
        units = floats.widen_normal_fp16(scales) * self.rows.unit_of(self.dim)
        units = np.where(scales == 0, np.float32(0), units)
        rows: np.ndarray = np.concatenate([levels, -levels])[numbers].reshape(
            *scales.shape, self.dim
        )
        return rows * units[..., None]


@functools.cache
def row_attention(rows: RotatedRows, dim: int) -> RowAttention:
    """Returns compiled code if it agrees with numpy on this host, else numpy."""
    reference = ReferenceAttention(rows, dim)
    compiled = compiled_module(KERNELS)
    kernel = compiled.attention_of(rows, dim) if compiled is not None else None
    if kernel is None or not _agree(kernel, reference, rows, dim):
        return reference
    found: RowAttention = kernel
    return found


def _agree(kernel: RowAttention, reference: RowAttention, rows: RotatedRows, dim: int) -> bool:
    """Returns whether both give the same values for a few rows, one of which is not packed."""
    wave = np.sin(np.arange(2 * SOME_TOKENS * dim, dtype=np.float32) ** 2).reshape(-1, dim)
    codes, scales = rows.pack(wave)
    codes, scales = codes.reshape(2, SOME_TOKENS, -1), scales.reshape(2, SOME_TOKENS)
    scales[1, 3] = 0
    for query in (wave[:2].reshape(2, 1, dim), wave[:8].reshape(2, 4, dim)):
        size = (2, query.shape[1], SOME_TOKENS)
        weights = np.abs(wave.reshape(-1)[: math.prod(size)]).reshape(size)
        results = []
        for each in (kernel, reference):
            products, sums = np.empty_like(weights), np.zeros_like(query)
            each.scores(query, codes, scales, products)
            each.add_weighted(weights, codes, scales, sums)
            results.append((products, sums))
        for one, other in zip(*results, strict=True):
            if not np.allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max()):
                logger.warning("scores of %s rows of %d are wrong: using numpy", rows, dim)
                return False
    return True
