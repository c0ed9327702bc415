"""The kernels of the row codecs as numba functions.

``parallel=True`` is never used: numba's default threading layer aborts the process when two Python
threads enter at once. The functions release the GIL; the store's own threads share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numba import njit
from numba.extending import intrinsic

from kvstore.codecs.kernels.emit.emitter import Emitter
from kvstore.codecs.kernels.rows import pack_rows, unpack_rows
from kvstore.codecs.kernels.rows.row_shape import RowShape
from kvstore.codecs.kernels.rows.row_shape import has_kernel as has_kernel
from kvstore.codecs.loops.numba_functions import (
    ADDRESS,
    LENGTHS,
    LINE,
    STRIDES,
    address_of,
    compiled,
    emitted,
    first_line_of,
    places_of,
    sources_of,
)
from kvstore.shapes import NUMPY_DTYPES, DType

SOURCES = sources_of(__file__)

DTYPES: tuple[DType, ...] = get_args(DType)
BLOCK_ROWS = 64
SCRATCH_NBYTES = 4 * BLOCK_ROWS  # a number for each row
SCALE_NBYTES = 2


def _row_intrinsic(emit: Callable[..., None]) -> Any:
    """Make an intrinsic (num_bits, dim, index of the dtype, sources: all literal; addresses).

    It returns nothing.
    """

    def typed(context: Any, bits: Any, dim: Any, dtype: Any, sources: Any, addresses: Any) -> Any:
        shape = RowShape(bits.literal_value, dim.literal_value, DTYPES[dtype.literal_value])

        def emit_here(builder: Any, numbers: Any) -> None:
            emit(Emitter(builder, shape.lanes), shape, *numbers)

        return emitted(emit_here, bits, dim, dtype, sources, addresses)

    return intrinsic(prefer_literal=True)(typed)


def _typed_scales(context: Any, lanes: Any, bits: Any, sources: Any, addresses: Any) -> Any:
    def emit_here(builder: Any, numbers: Any) -> None:
        pack_rows.emit_scales(Emitter(builder, lanes.literal_value), bits.literal_value, *numbers)

    return emitted(emit_here, lanes, bits, sources, addresses)


_row_squares = _row_intrinsic(pack_rows.emit_squares)
_norms = _row_intrinsic(pack_rows.emit_norms)
_pack_row = _row_intrinsic(pack_rows.emit_pack)
_row_energy = _row_intrinsic(pack_rows.emit_energy)
_unpack_row = _row_intrinsic(unpack_rows.emit_unpack)
_scales: Any = intrinsic(prefer_literal=True)(_typed_scales)


@njit
def _to_next_block(places, number, head, token, count):
    """Return the bytes from the start of a block, which ends before ``token``, to the next's."""
    address, to_head, to_token, _, heads, tokens, _, _ = places[number]
    step = count * to_token
    if token < tokens:
        return step
    if head + 1 < heads:
        return step + to_head - token * to_token
    begin = address + head * to_head + token * to_token
    return step + places[min(number + 1, len(places) - 1), ADDRESS] - begin


def _pack_function(bits: int, dim: int, dtype: int) -> Any:
    sources, row_nbytes = SOURCES, bits * dim // 8
    lanes = RowShape(bits, dim, DTYPES[dtype]).lanes

    def pack(payload, offsets, places):
        scratch = np.zeros(SCRATCH_NBYTES * (3 + lanes) + LINE, np.uint8)
        norms = first_line_of(scratch)
        factors, energies = norms + SCRATCH_NBYTES, norms + 2 * SCRATCH_NBYTES
        sums = norms + 3 * SCRATCH_NBYTES
        for number in range(len(offsets)):
            address, to_head, to_token, _, heads, tokens, _, _ = places[number]
            packed = address_of(payload) + offsets[number, 0]
            scales = address_of(payload) + offsets[number, 1]
            for head in range(heads):
                row = address + head * to_head
                for first in range(0, tokens, BLOCK_ROWS):
                    count = min(tokens - first, BLOCK_ROWS)
                    ahead = _to_next_block(places, number, head, first + count, count)
                    for i in range(count):
                        source = row + i * to_token
                        _row_squares(bits, dim, dtype, sources, (source, sums + 4 * lanes * i))
                    for i in range(0, count, lanes):
                        groups = (sums + 4 * lanes * i, norms + 4 * i, factors + 4 * i)
                        _norms(bits, dim, dtype, sources, groups)
                    for i in range(count):
                        target = packed + i * row_nbytes
                        addresses = (row, factors + 4 * i, target, row + ahead)
                        _pack_row(bits, dim, dtype, sources, addresses)
                        row += to_token
                    for i in range(count):
                        target = packed + i * row_nbytes
                        _row_energy(bits, dim, dtype, sources, (target, energies + 4 * i))
                    whole = count - count % 16
                    for i in range(0, whole, 16):
                        target = scales + i * SCALE_NBYTES
                        _scales(16, bits, sources, (norms + 4 * i, energies + 4 * i, target))
                    for i in range(whole, count):
                        target = scales + i * SCALE_NBYTES
                        _scales(1, bits, sources, (norms + 4 * i, energies + 4 * i, target))
                    packed += count * row_nbytes
                    scales += count * SCALE_NBYTES
        scratch[0] = 0  # numba frees an array after its last use; its address does not count

    return compiled("void", pack, "u1:1 i8:2 i8:2")


def _unpack_function(bits: int, dim: int, dtype: int) -> Any:
    sources, row_nbytes = SOURCES, bits * dim // 8

    def unpack(payloads, offsets, places):
        for which in range(len(payloads)):
            for number in range(len(offsets)):
                address, to_head, to_token, _, heads, tokens, _, _ = places[number]
                packed = payloads[which] + offsets[number, 0]
                scale = payloads[which] + offsets[number, 1]
                count = tokens // len(payloads)
                for head in range(heads):
                    row = address + head * to_head + which * count * to_token
                    for _ in range(count):
                        _unpack_row(bits, dim, dtype, sources, (packed, scale, row))
                        row += to_token
                        packed += row_nbytes
                        scale += SCALE_NBYTES

    return compiled("void", unpack, "i8:1 i8:2 i8:2")


@dataclass(frozen=True)
class NumbaKernel:
    """Implements ``kvstore.codecs.rows.backend.ArrayKernel`` with compiled functions."""

    pack_rows: Any
    unpack_rows: Any
    value_nbytes: int

    def pack(self, sources, payload, group):
        """Pack the rows of arrays; see ``ArrayKernel.pack``.

        Raises:
            ValueError: the values of a row are not contiguous.
        """
        self.pack_rows(payload, group.offsets, self._places(places_of(sources)))

    def unpack(self, payloads, group, outs):
        """Unpack rows into arrays; see ``ArrayKernel.unpack``.

        Raises:
            ValueError: the values of a row are not contiguous, or an array is read only.
        """
        addresses = np.array([payload.ctypes.data for payload in payloads], np.int64)
        self.unpack_rows(addresses, group.offsets, self._places(places_of(outs, written=True)))

    def _places(self, places: np.ndarray) -> np.ndarray:
        apart = places[places[:, STRIDES + 2] != self.value_nbytes]
        if apart.size and apart[:, LENGTHS : LENGTHS + 3].all(axis=1).any():
            raise ValueError("the values of a row have to lie side by side in memory")
        return places


def compile_kernel(num_bits: int, dim: int, dtype: DType) -> NumbaKernel:
    """Compile a kernel: seconds the first time on a machine, milliseconds from numba's cache."""
    shape = (num_bits, dim, DTYPES.index(dtype))
    value_nbytes = NUMPY_DTYPES[dtype].itemsize
    return NumbaKernel(_pack_function(*shape), _unpack_function(*shape), value_nbytes)
