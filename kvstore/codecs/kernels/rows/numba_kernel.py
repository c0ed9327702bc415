"""The kernels of the row codecs as numba functions.

``parallel=True`` is never used: numba's default threading layer aborts the process when two Python
threads enter at once. The functions release the GIL; the store's own threads share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from kvstore.codecs.kernels.emit.emitter import Emitter
from kvstore.codecs.kernels.rows import pack_rows, unpack_rows
from kvstore.codecs.kernels.rows.row_shape import RowShape
from kvstore.codecs.kernels.rows.row_shape import has_kernel as has_kernel
from kvstore.codecs.loops.numba_functions import LINE, SOURCES, compiled, emitted
from kvstore.codecs.rows.payload import SlotGroup
from kvstore.shapes import NUMPY_DTYPES, DType

DTYPES: tuple[DType, ...] = get_args(DType)
# fp16 is passed as bit patterns: numba cannot compute with it on a CPU, and need not do so.
ELEMENTS = {"float32": types.float32, "bfloat16": types.uint16, "float16": types.uint16}
BLOCK_ROWS = 64
SCRATCH_NBYTES = 4 * BLOCK_ROWS  # a number for each row
BATCH = 8  # arrays per call: entering numba and releasing the GIL costs as much as 100 rows
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
def _to_next_block(
    arrays: Any, num_arrays: int, number: int, head: int, token: int, count: int
) -> Any:
    """Return the bytes from the start of a block, which ends before ``token``, to the next's."""
    array = arrays[number]
    step = count * array.strides[1]
    if token < array.shape[1]:
        return step
    if head + 1 < array.shape[0]:
        return step + array.strides[0] - token * array.strides[1]
    begin = array.ctypes.data + head * array.strides[0] + token * array.strides[1]
    return step + arrays[min(number + 1, num_arrays - 1)].ctypes.data - begin


def _pack_function(bits: int, dim: int, dtype: int) -> Any:
    sources, row_nbytes, value_nbytes = SOURCES, bits * dim // 8, _value_nbytes(dtype)
    lanes = RowShape(bits, dim, DTYPES[dtype]).lanes

    def pack(
        payload: Any, offsets: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any
    ) -> None:
        arrays = (a, b, c, d, e, f, g, h)
        scratch = np.zeros(SCRATCH_NBYTES * (3 + lanes) + LINE, np.uint8)
        norms = (scratch.ctypes.data + LINE - 1) // LINE * LINE
        factors, energies = norms + SCRATCH_NBYTES, norms + 2 * SCRATCH_NBYTES
        sums = norms + 3 * SCRATCH_NBYTES
        for number in range(len(offsets)):
            array = arrays[number]
            if array.size and array.strides[2] != value_nbytes:
                raise ValueError("the values of a row have to lie side by side in memory")
            packed = payload.ctypes.data + offsets[number, 0]
            scales = payload.ctypes.data + offsets[number, 1]
            for head in range(array.shape[0]):
                row = array.ctypes.data + head * array.strides[0]
                for first in range(0, array.shape[1], BLOCK_ROWS):
                    count = min(array.shape[1] - first, BLOCK_ROWS)
                    ahead = _to_next_block(arrays, len(offsets), number, head, first + count, count)
                    for i in range(count):
                        source = row + i * array.strides[1]
                        _row_squares(bits, dim, dtype, sources, (source, sums + 4 * lanes * i))
                    for i in range(0, count, lanes):
                        groups = (sums + 4 * lanes * i, norms + 4 * i, factors + 4 * i)
                        _norms(bits, dim, dtype, sources, groups)
                    for i in range(count):
                        target = packed + i * row_nbytes
                        addresses = (row, factors + 4 * i, target, row + ahead)
                        _pack_row(bits, dim, dtype, sources, addresses)
                        row += array.strides[1]
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

    return compiled(types.void, pack, *_argument_types(dtype, payload_is_input=False))


def _unpack_function(bits: int, dim: int, dtype: int) -> Any:
    sources, row_nbytes, value_nbytes = SOURCES, bits * dim // 8, _value_nbytes(dtype)

    def unpack(
        payload: Any, offsets: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any
    ) -> None:
        arrays = (a, b, c, d, e, f, g, h)
        for number in range(len(offsets)):
            array = arrays[number]
            if array.size and array.strides[2] != value_nbytes:
                raise ValueError("the values of a row have to lie side by side in memory")
            packed = payload.ctypes.data + offsets[number, 0]
            scale = payload.ctypes.data + offsets[number, 1]
            for head in range(array.shape[0]):
                row = array.ctypes.data + head * array.strides[0]
                for _ in range(array.shape[1]):
                    _unpack_row(bits, dim, dtype, sources, (packed, scale, row))
                    row += array.strides[1]
                    packed += row_nbytes
                    scale += SCALE_NBYTES

    return compiled(types.void, unpack, *_argument_types(dtype, payload_is_input=True))


def _argument_types(dtype: int, payload_is_input: bool) -> tuple[Any, ...]:
    payload = types.Array(types.uint8, 1, "C", readonly=payload_is_input)
    offsets = types.Array(types.int64, 2, "C")
    element = ELEMENTS[DTYPES[dtype]]
    array = types.Array(element, 3, "A", readonly=not payload_is_input)
    return (payload, offsets, *[array] * BATCH)


def _value_nbytes(dtype: int) -> int:
    return NUMPY_DTYPES[DTYPES[dtype]].itemsize


@dataclass(frozen=True)
class NumbaKernel:
    """Implements ``kvstore.codecs.rows.backend.ArrayKernel`` with compiled functions."""

    pack_batch: Any
    unpack_batch: Any
    as_bits: bool  # the arrays are fp16, and are passed as uint16

    def pack(self, sources: Sequence[np.ndarray], payload: np.ndarray, group: SlotGroup) -> None:
        """Pack the rows of arrays; see ``ArrayKernel.pack``.

        Raises:
            ValueError: the values of a row are not contiguous.
        """
        for offsets, batch in self._batches(sources, group):
            self.pack_batch(payload, offsets, *batch)

    def unpack(self, payload: np.ndarray, group: SlotGroup, outs: Sequence[np.ndarray]) -> None:
        """Unpack rows into arrays; see ``ArrayKernel.unpack``.

        Raises:
            ValueError: the values of a row are not contiguous.
        """
        for offsets, batch in self._batches(outs, group):
            self.unpack_batch(payload, offsets, *batch)

    def _batches(
        self, arrays: Sequence[np.ndarray], group: SlotGroup
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yield offsets of a few arrays, and these arrays, padded to ``BATCH`` with the first."""
        if self.as_bits:
            arrays = [array.view(np.uint16) for array in arrays]
        for first in range(0, len(arrays), BATCH):
            batch = list(arrays[first : first + BATCH])
            offsets = group.offsets[first : first + BATCH]
            yield offsets, batch + batch[:1] * (BATCH - len(batch))


def compile_kernel(num_bits: int, dim: int, dtype: DType) -> NumbaKernel:
    """Compile a kernel: seconds the first time on a machine, milliseconds from numba's cache."""
    shape = (num_bits, dim, DTYPES.index(dtype))
    return NumbaKernel(_pack_function(*shape), _unpack_function(*shape), dtype == "float16")
