"""Attention to rows as ``rows.rotated_rows`` packs them, without restoring them.

*To packed rows*: products with queries, and weighted sums. A row is restored as
``unit S H^T level[code]``. So

    q . row             = unit (H S q) . level[code]          the query is rotated, once
    sum of weight row   = S H^T sum of weight unit level[code]  the sum is rotated back, once

and no row is ever restored. The rotation costs as much as restoring one row, however many rows
there are. A row whose scale is zero counts as a row of zeros. Sums are in fp32, so their last bits
depend on the order of addition; up to those bits, values equal those of restored rows.

*To a session's rows*, the first and newest exact, those between packed:

    weights = softmax(q . keys)    out = sum of weight value

Queries come scaled. Exact rows are bit patterns of 16-bit floats (see ``codecs.floats``).
numpy defines both here; ``kernels.rows`` has them compiled.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from kvstore.codecs.floats import narrow, to_stored, widen, widen_normal_fp16
from kvstore.codecs.loops.compiled import compiled_module, proven
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_format import from_planes
from kvstore.shapes import DType

KERNELS: Final = "kvstore.codecs.kernels.rows.numba_attention"
SESSION_KERNELS: Final = "kvstore.codecs.kernels.rows.numba_session_attention"
SOME_TOKENS = 263  # tokens on which compiled code and numpy are compared; not a multiple of a tile
TOLERANCE = 1e-4  # the largest difference of compiled code from numpy, times the largest value


class RowAttention(Protocol):
    """Attends to rows of one format and length. Stateless and thread-safe."""

    def scores(
        self, query: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        """Write the product of every query with every row of its head to ``out``.

        ``query``: fp32 (heads, queries, dim). ``codes``: uint8 (heads, tokens, row_nbytes), rows
        side by side. ``scales``: uint16 (heads, tokens). ``out``: fp32 (heads, queries, tokens).
        The last axis of each is contiguous.
        """

    def add_weighted(
        self, weights: np.ndarray, codes: np.ndarray, scales: np.ndarray, out: np.ndarray
    ) -> None:
        """Add weighted sums of the rows of each head to ``out``, fp32 (heads, queries, dim).

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
        """Return rows before their rotation, fp32 (heads, tokens, dim)."""
        levels = self.rows.levels.astype(np.float32)
        flat = np.ascontiguousarray(codes).reshape(-1, codes.shape[2])
        numbers = from_planes(flat, self.rows.num_bits)
        units = widen_normal_fp16(scales) * self.rows.unit_of(self.dim)
        units = np.where(scales == 0, np.float32(0), units)
        rows: np.ndarray = np.concatenate([levels, -levels])[numbers].reshape(
            *scales.shape, self.dim
        )
        return rows * units[..., None]


@functools.cache
def row_attention(rows: RotatedRows, dim: int) -> RowAttention:
    """Return compiled code if it agrees with numpy on this host, else numpy."""
    reference, kernels = ReferenceAttention(rows, dim), compiled_module(KERNELS)
    kernel: RowAttention | None = kernels.attention_of(rows, dim) if kernels else None
    return proven(kernel, reference, lambda x: _agree(x, reference), f"scores of {reference}")


def _agree(kernel: RowAttention, reference: ReferenceAttention) -> bool:
    """Return whether both give the same values for a few rows, one of which is not packed."""
    dim = reference.dim
    codes, scales = _some_packed(reference.rows, SOME_TOKENS, dim)
    for num_queries in (1, 4):
        query, weights = _wave(2, num_queries, dim), np.abs(_wave(2, num_queries, SOME_TOKENS))
        products = np.empty((2, *weights.shape), np.float32)
        sums = np.zeros((2, *query.shape), np.float32)
        for number, each in enumerate((kernel, reference)):
            each.scores(query, codes, scales, products[number])
            each.add_weighted(weights, codes, scales, sums[number])
        if not (_are_close(*products) and _are_close(*sums)):
            return False
    return True


class SessionRows(NamedTuple):
    """K or V of one layer of one session, in the order of tokens. Rows are contiguous."""

    sinks: np.ndarray  # uint16 (heads, tokens, dim)
    codes: np.ndarray  # uint8 (heads, tokens, row_nbytes)
    scales: np.ndarray  # uint16 (heads, tokens)
    recent: np.ndarray  # uint16 (heads, tokens, dim)


@dataclass(frozen=True)
class RowShapes:
    """The shapes of a session's rows in one layer.

    ``dtype``: the dtype of exact rows. ``num_queries``: how many queries share a KV head.
    """

    rows: RotatedRows
    key_dim: int
    value_dim: int
    dtype: DType
    num_queries: int


class SessionAttention(Protocol):
    """Attends to the rows of a session in one layer. Stateless and thread-safe."""

    def attend(
        self, query: np.ndarray, keys: SessionRows, values: SessionRows, out: np.ndarray
    ) -> None:
        """Write attention to ``out``, fp32 (heads, queries, value_dim), contiguous.

        ``query``: fp32 (heads, queries, key_dim), contiguous: the queries that share a KV head.
        """


@dataclass(frozen=True)
class ReferenceSessionAttention:
    """The definition, in numpy. Implements ``SessionAttention``."""

    shapes: RowShapes

    def attend(
        self, query: np.ndarray, keys: SessionRows, values: SessionRows, out: np.ndarray
    ) -> None:
        first = keys.sinks.shape[1]
        last = first + keys.scales.shape[1]
        exact = np.matmul(query, self._exact(keys).swapaxes(1, 2))
        packed = np.empty((*query.shape[:2], last - first), np.float32)
        if last > first:
            self._packed(self.shapes.key_dim).scores(query, keys.codes, keys.scales, packed)
        scores = np.concatenate([exact[:, :, :first], packed, exact[:, :, first:]], axis=2)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        of_exact = np.concatenate([weights[:, :, :first], weights[:, :, last:]], axis=2)
        np.matmul(of_exact, self._exact(values), out=out)
        if last > first:
            rows = self._packed(self.shapes.value_dim)
            rows.add_weighted(weights[:, :, first:last], values.codes, values.scales, out)

    def _exact(self, side: SessionRows) -> np.ndarray:
        return widen(np.concatenate([side.sinks, side.recent], axis=1), self.shapes.dtype)

    def _packed(self, dim: int) -> RowAttention:
        return ReferenceAttention(self.shapes.rows, dim)


@functools.cache
def session_attention(shapes: RowShapes) -> SessionAttention:
    """Return compiled code if it agrees with numpy on this host, else numpy."""
    reference, kernels = ReferenceSessionAttention(shapes), compiled_module(SESSION_KERNELS)
    kernel: SessionAttention | None = kernels.attention_of(shapes) if kernels else None
    agrees = functools.partial(_attend_alike, reference)
    return proven(kernel, reference, agrees, f"functions of attention to {shapes}")


def _attend_alike(reference: ReferenceSessionAttention, kernel: SessionAttention) -> bool:
    """Return whether both give the same values for a few rows, one of which is not packed."""
    shapes = reference.shapes
    keys, values = (_some_rows(shapes, dim) for dim in (shapes.key_dim, shapes.value_dim))
    query = _wave(2, shapes.num_queries, shapes.key_dim)
    found = np.empty((2, 2, shapes.num_queries, shapes.value_dim), np.float32)
    for each, out in zip((kernel, reference), found, strict=True):
        each.attend(query, keys, values, out)
    return _are_close(*found)


def _some_rows(shapes: RowShapes, dim: int) -> SessionRows:
    exact = narrow(_wave(2, 6, dim), shapes.dtype)
    bits = to_stored(exact, shapes.dtype)
    return SessionRows(bits[:, :4].copy(), *_some_packed(shapes.rows, 7, dim), bits[:, 4:].copy())


def _some_packed(rows: RotatedRows, num_tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = rows.pack(_wave(2 * num_tokens, dim))
    scales = scales.reshape(2, num_tokens)
    scales[1, 3] = 0
    return codes.reshape(2, num_tokens, -1), scales


def _wave(*shape: int) -> np.ndarray:
    return np.sin(np.arange(math.prod(shape), dtype=np.float32) ** 2).reshape(shape)


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max())
