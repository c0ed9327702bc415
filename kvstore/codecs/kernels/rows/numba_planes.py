"""Attends to planes in numba functions; the counterpart of ``codecs.attention.planes``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from kvstore.codecs.kernels.emit.dots import host_vectors
from kvstore.codecs.kernels.emit.emitter import Emitter
from kvstore.codecs.kernels.rows import attend_angles, attend_planes
from kvstore.codecs.loops.numba_functions import (
    array_of,
    compiled,
    copy,
    emitted,
    sources_of,
    tuple_of,
)

SOURCES = sources_of(__file__)

LANES = host_vectors().lanes
TILE = attend_planes.TILE_VECTORS * LANES  # tokens


def _intrinsic(emit: Mapping[str, Callable[..., None]]) -> Any:
    """Make an intrinsic of what planes hold, number of bits and of queries, sources; addresses.

    All but the addresses are literal.
    """

    def typed(context: Any, codes: Any, bits: Any, queries: Any, sources: Any, at: Any) -> Any:
        def emit_here(builder: Any, numbers: Any) -> None:
            shape = bits.literal_value, queries.literal_value
            emit[codes.literal_value](Emitter(builder, LANES), *shape, numbers)

        return emitted(emit_here, codes, bits, queries, sources, at)

    return intrinsic(prefer_literal=True)(typed)


_products_of_tile = _intrinsic(
    {"levels": attend_planes.emit_products, "angles": attend_angles.emit_products}
)
_add_tile = _intrinsic({"levels": attend_planes.emit_sums, "angles": attend_angles.emit_sums})


@njit
def _copy_rest(planes: Any, unit: int, tokens: int, rest: Any) -> None:
    """Copy the bytes of all planes from the last whole tile on; the others of ``rest`` are zero."""
    first = tokens // TILE * (TILE // 8)
    for plane in range(planes.shape[1]):
        for byte in range(first, planes.shape[2]):
            rest[plane, byte - first] = planes[unit, plane, byte]


def _products_function(codes: str, bits: int, num_queries: int) -> Any:
    sources = SOURCES

    def products(planes: Any, place: Any, table: Any, query: Any, out: Any) -> None:
        first, step = place
        units, _, tokens = out.shape
        columns, whole = query.shape[2], tokens - tokens % TILE
        rest = np.zeros((planes.shape[1], TILE // 8), np.uint8)
        last = np.empty((num_queries, TILE), np.float32)
        steps = (planes.strides[1], step * planes.strides[1], columns, table.ctypes.data)
        rest_steps = (TILE // 8, step * (TILE // 8), columns, table.ctypes.data)
        for unit in range(units):
            queries = (query.ctypes.data + unit * query.strides[0], query.strides[1])
            begin = planes.ctypes.data + unit * planes.strides[0] + first * planes.strides[1]
            target = out.ctypes.data + unit * out.strides[0]
            for token in range(0, whole, TILE):
                at = (begin + token // 8, *steps, *queries, target + 4 * token, out.strides[1])
                _products_of_tile(codes, bits, num_queries, sources, at)
            if whole < tokens:
                _copy_rest(planes, unit, tokens, rest)
                begin = rest.ctypes.data + first * (TILE // 8)
                ends = (last.ctypes.data, 4 * TILE)
                last_at = (begin, *rest_steps, *queries, *ends)
                _products_of_tile(codes, bits, num_queries, sources, last_at)
                copy(last, out[unit, :, whole:])
        rest[0, 0] = 0  # numba frees an array after its last use; its address does not count

    return compiled(types.void, products, *_argument_types())


def _sums_function(codes: str, bits: int, num_queries: int) -> Any:
    sources, lanes = SOURCES, LANES

    def sums(planes: Any, place: Any, table: Any, weights: Any, out: Any) -> None:
        first, step = place
        units, _, tokens = weights.shape
        columns, whole = out.shape[2], tokens - tokens % TILE
        rest = np.zeros((planes.shape[1], TILE // 8), np.uint8)
        last = np.zeros((num_queries, TILE), np.float32)
        total = np.empty((columns, num_queries, lanes), np.float32)
        steps = (planes.strides[1], step * planes.strides[1], columns, table.ctypes.data)
        rest_steps = (TILE // 8, step * (TILE // 8), columns, table.ctypes.data)
        for unit in range(units):
            total[:] = 0
            begin = planes.ctypes.data + unit * planes.strides[0] + first * planes.strides[1]
            source = weights.ctypes.data + unit * weights.strides[0]
            for token in range(0, whole, TILE):
                given = (source + 4 * token, weights.strides[1], total.ctypes.data)
                at = (begin + token // 8, *steps, *given)
                _add_tile(codes, bits, num_queries, sources, at)
            if whole < tokens:
                _copy_rest(planes, unit, tokens, rest)
                copy(weights[unit, :, whole:], last[:, : tokens - whole])
                given = (last.ctypes.data, 4 * TILE, total.ctypes.data)
                begin = rest.ctypes.data + first * (TILE // 8)
                _add_tile(codes, bits, num_queries, sources, (begin, *rest_steps, *given))
            for q in range(num_queries):
                for column in range(columns):
                    out[unit, q, column] = total[column, q].sum()
        rest[0, 0] = 0  # as in ``products``

    return compiled(types.void, sums, *_argument_types())


def _argument_types() -> tuple[Any, ...]:
    planes = types.Array(types.uint8, 3, "C", readonly=True)
    place = tuple_of(types.int64, types.int64)
    given = types.Array(types.float32, 3, "A", readonly=True)
    return planes, place, array_of(types.float32, 1), given, types.Array(types.float32, 3, "A")


@functools.cache
def products_kernel(codes: str, bits: int, num_queries: int) -> Any:
    """Compile the products of ``num_queries`` queries with "levels" or "angles" in planes.

    ``bits``: the planes of a column of levels.
    """
    return _products_function(codes, bits, num_queries)


@functools.cache
def sums_kernel(codes: str, bits: int, num_queries: int) -> Any:
    """Compile the weighted sums of the same, for ``num_queries`` lists of weights."""
    return _sums_function(codes, bits, num_queries)
