"""Attention of new tokens to a session's rows: the first and newest exact, those between packed.

    weights = softmax(q . keys)    out = sum of weight value

Queries come scaled. Exact rows are bit patterns of 16-bit floats (see ``codecs.floats``); packed
rows are multiplied as ``attention.rotated`` has it.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from kvstore.codecs.attention.rotated import TOLERANCE, ReferenceAttention, RowAttention
from kvstore.codecs.floats import round_to_bf16, widen
from kvstore.codecs.loops.compiled import compiled_module
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.shapes import DType

logger = logging.getLogger(__name__)

KERNELS: Final = "kvstore.codecs.kernels.rows.numba_session_attention"


class SessionRows(NamedTuple):
    """K or V of one layer of one session, in the order of tokens. Rows are contiguous."""

    sinks: np.ndarray  # uint16 (heads, tokens, dim)
    codes: np.ndarray  # uint8 (heads, tokens, row_nbytes)
    scales: np.ndarray  # uint16 (heads, tokens)
    recent: np.ndarray  # uint16 (heads, tokens, dim)


@dataclass(frozen=True)
class RowShapes:
    """The shapes of a session's rows in one layer.

    ``dtype``: of the exact rows. ``num_queries``: that share a KV head.
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
        """Writes attention to ``out``, fp32 (heads, queries, value_dim), contiguous.

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
    """Returns compiled code if it agrees with numpy on this host, else numpy."""
    reference = ReferenceSessionAttention(shapes)
    kernels = compiled_module(KERNELS)
    compiled: SessionAttention | None = kernels.attention_of(shapes) if kernels else None
    return compiled if compiled is not None and _agree(compiled, reference) else reference


def _agree(compiled: SessionAttention, reference: ReferenceSessionAttention) -> bool:
    """Returns whether both give the same values for a few rows, one of which is not packed."""
    shapes = reference.shapes
    keys, values = (_some_rows(shapes, dim) for dim in (shapes.key_dim, shapes.value_dim))
    query = _wave(2 * shapes.num_queries * shapes.key_dim).reshape(2, shapes.num_queries, -1)
    found = np.empty((2, shapes.num_queries, shapes.value_dim), np.float32)
    right = np.empty_like(found)
    compiled.attend(query, keys, values, found)
    reference.attend(query, keys, values, right)
    if np.allclose(found, right, rtol=0, atol=TOLERANCE * np.abs(right).max()):
        return True
    logger.warning("compiled attention to rows of %s is wrong: using numpy", shapes)
    return False


def _some_rows(shapes: RowShapes, dim: int) -> SessionRows:
    codes, scales = shapes.rows.pack(_wave(2 * 7 * dim).reshape(-1, dim))
    codes, scales = codes.reshape(2, 7, -1), scales.reshape(2, 7)
    scales[1, 3] = 0
    exact = _wave(2 * 6 * dim).reshape(2, 6, dim)
    bits = (
        exact.astype(np.float16).view(np.uint16)
        if shapes.dtype == "float16"
        else round_to_bf16(exact)
    )
    return SessionRows(bits[:, :4].copy(), codes, scales, bits[:, 4:].copy())


def _wave(size: int) -> np.ndarray:
    return np.sin(np.arange(size, dtype=np.float32) ** 2)
