"""Attends to exact and packed rows of a session in one numba function for each shape.

The counterpart of ``rows.attention``. One call computes a layer: with a few
thousand tokens, calls of numpy in between would take longer than the rows do.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types

from kvstore.codecs.kernels.rows.numba_attention import (
    add_rows,
    blocks_of,
    multiply_rows,
    rotate,
    rotation_of,
    rows_of_head,
    turn_type,
)
from kvstore.codecs.kernels.rows.row_shape import has_kernel
from kvstore.codecs.loops.numba_functions import address_of, compiled, copy, sources_of, tuple_of
from kvstore.codecs.rows.attention import RowShapes, SessionRows

SOURCES = sources_of(__file__)

_LOG2_E = np.float32(1 / math.log(2))
_LN_2 = np.float32(math.log(2))
_SERIES = tuple(np.float32(1 / math.factorial(k)) for k in range(6, -1, -1))  # of e to a power
_LEAST_EXPONENT = np.float32(-126)  # 2 to this is the smallest normal fp32; less counts as that
_TO_FP16 = np.float32(2.0**112)  # the distance of fp16's exponents from fp32's
_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}  # sums may be added up lane by lane


@njit(fastmath=_IN_ANY_ORDER)
def _wide(bits, is_fp16):
    """Return the fp32 value of a 16-bit float's bit pattern."""
    if not is_fp16:
        return np.uint32(np.uint32(bits) << 16).view(np.float32)
    magnitude = np.uint32(np.uint32(bits & 0x7FFF) << 13)
    value = np.float32(np.uint32(magnitude).view(np.float32) * _TO_FP16)
    infinite = np.uint32(0x7F800000) if magnitude >= np.uint32(31 << 23) else np.uint32(0)
    sign = np.uint32(np.uint32(bits & 0x8000) << 16)
    return np.uint32(np.float32(value).view(np.uint32) | infinite | sign).view(np.float32)


@njit(fastmath=_IN_ANY_ORDER)
def _multiply_exact(query, rows, is_fp16, scores, first):
    """Write the products of queries with exact rows to ``scores[:, first:]``."""
    for t in range(rows.shape[0]):
        for q in range(query.shape[0]):
            total = np.float32(0)
            for i in range(rows.shape[1]):
                total += query[q, i] * _wide(rows[t, i], is_fp16)
            scores[q, first + t] = total


@njit(fastmath=_IN_ANY_ORDER)
def _add_exact(weights, first, rows, is_fp16, sums):
    """Add exact rows to ``sums``, (queries, dim), weighted with ``weights[:, first:]``."""
    for t in range(rows.shape[0]):
        for q in range(sums.shape[0]):
            weight = weights[q, first + t]
            for i in range(rows.shape[1]):
                sums[q, i] += weight * _wide(rows[t, i], is_fp16)


@njit(fastmath=_IN_ANY_ORDER | {"nnan"})
def _largest(values):
    largest = np.float32(-np.inf)
    for i in range(len(values)):
        largest = max(largest, values[i])
    return largest


@njit(fastmath=_IN_ANY_ORDER)
def _to_weights(scores):
    """Replace scores by their exponentials, less the largest score; return the sum of these.

    2 to a power between -.5 and .5 is its Taylor series, to the last bit or two of an fp32.
    """
    largest, total = _largest(scores), np.float32(0)
    for i in range(len(scores)):
        power = max((scores[i] - largest) * _LOG2_E, _LEAST_EXPONENT)
        whole = np.floor(power + np.float32(0.5))
        x = (power - whole) * _LN_2
        series = _SERIES[0]
        for k in range(1, len(_SERIES)):
            series = series * x + _SERIES[k]
        scale = np.uint32(np.uint32(np.int32(whole) + np.int32(127)) << 23).view(np.float32)
        scores[i] = series * scale
        total += scores[i]
    return total


def _attend_function(shapes: RowShapes, num_queries: int) -> Any:
    bits, sources, is_fp16 = shapes.rows.num_bits, SOURCES, shapes.dtype == "float16"
    key_dim, value_dim = shapes.key_dim, shapes.value_dim

    def attend(query, keys, values, out, key_turn, value_turn):
        heads, packed = keys[2].shape
        first = keys[0].shape[1]
        last = first + packed
        tokens = last + keys[3].shape[1]
        scores = np.empty((num_queries, tokens), np.float32)
        rotated = np.empty((num_queries, key_dim), np.float32)
        sums = np.empty((num_queries, value_dim), np.float32)
        totals = np.empty(num_queries, np.float32)
        for head in range(heads):
            _multiply_exact(query[head], keys[0][head], is_fp16, scores, 0)
            _multiply_exact(query[head], keys[3][head], is_fp16, scores, last)
            copy(query[head], rotated)
            rotate(rotated, key_turn, False)
            rows = rows_of_head(keys[1], keys[2], head)
            columns = (address_of(scores) + 4 * first, 4 * tokens)
            multiply_rows(bits, key_dim, num_queries, sources, rows, address_of(rotated), columns)
            for q in range(num_queries):
                totals[q] = _to_weights(scores[q])
            sums[:] = 0
            rows = rows_of_head(values[1], values[2], head)
            add_rows(bits, value_dim, num_queries, sources, rows, columns, address_of(sums))
            rotate(sums, value_turn, True)
            _add_exact(scores, 0, values[0][head], is_fp16, sums)
            _add_exact(scores, last, values[3][head], is_fp16, sums)
            for q in range(num_queries):
                for i in range(value_dim):
                    out[head, q, i] = sums[q, i] / totals[q]
        rotated[0, 0] = 0  # numba frees an array after its last use; its address does not count
        sums[0, 0] = 0
        scores[0, 0] = 0

    codes = types.Array(types.uint8, 3, "A", readonly=True)
    scales = types.Array(types.uint16, 2, "A", readonly=True)
    side, turn = tuple_of("u2:3r", codes, scales, "u2:3r"), turn_type()
    target = types.Array(types.float32, 3, "A")
    return compiled("void", attend, "f4:3r", side, side, target, turn, turn)


_function = functools.cache(_attend_function)


@dataclass(frozen=True)
class NumbaSessionAttention:
    """Implements ``kvstore.codecs.rows.attention.SessionAttention``."""

    shapes: RowShapes

    def attend(self, query, keys, values, out):
        sides = _contiguous(keys), _contiguous(values)
        for part in blocks_of(query.shape[1]):
            attend = _function(self.shapes, part.stop - part.start)
            attend(np.ascontiguousarray(query[:, part]), *sides, out[:, part], *self._turns)

    @functools.cached_property
    def _turns(self) -> tuple[Any, Any]:
        return rotation_of(self.shapes.key_dim), rotation_of(self.shapes.value_dim)


def _contiguous(side: SessionRows) -> tuple[np.ndarray, ...]:
    sinks, recent = np.ascontiguousarray(side.sinks), np.ascontiguousarray(side.recent)
    return sinks, side.codes, side.scales, recent


def attention_of(shapes: RowShapes) -> NumbaSessionAttention | None:
    """Return the compiled functions for these rows, or None if there are none."""
    can = has_kernel(shapes.key_dim) and has_kernel(shapes.value_dim)
    return NumbaSessionAttention(shapes) if can else None
