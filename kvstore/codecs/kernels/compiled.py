"""Kernels as numba functions.

``parallel=True`` is never used: numba's default threading layer aborts the process when two Python
threads enter at once. The functions release the GIL; the store's own threads share the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from kvstore.codecs import floats, lloyd_max, rotated_rows, rotation
from kvstore.codecs.kernels import rows
from kvstore.codecs.kernels.emitter import Emitter
from kvstore.codecs.kernels.rows import has_kernel as has_kernel
from kvstore.codecs.payload import ArraySlot
from kvstore.shapes import NUMPY_DTYPES, DType

DTYPES: tuple[DType, ...] = get_args(DType)
# fp16 travels as bit patterns: numba cannot compute with it on a CPU, and need not.
ELEMENTS = {"float32": types.float32, "bfloat16": types.uint16, "float16": types.uint16}
BLOCK_ROWS = 64
SCALE_NBYTES = 2


def _sources_digest() -> int:
    """Enters every cached function: numba itself looks only at the file a function stands in."""
    modules = (floats, lloyd_max, rotated_rows, rotation)
    paths = [*sorted(Path(__file__).parent.glob("*.py")), *(Path(str(m.__file__)) for m in modules)]
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in paths), digest_size=6)
    return int.from_bytes(digest.digest(), "big")


SOURCES = _sources_digest()


def _row_intrinsic(emit: Callable[..., None]) -> Any:
    """(num_bits, dim, index of the dtype, sources: all literal; addresses) -> nothing."""

    def typed(context: Any, bits: Any, dim: Any, dtype: Any, sources: Any, addresses: Any) -> Any:
        shape = rows.RowShape(bits.literal_value, dim.literal_value, DTYPES[dtype.literal_value])

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(Emitter(builder, shape.lanes), shape, *_unpacked(builder, args[4]))
            return context.get_dummy_value()

        return types.void(bits, dim, dtype, sources, addresses), generate

    return intrinsic(prefer_literal=True)(typed)


def _typed_scales(context: Any, lanes: Any, sources: Any, addresses: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows.emit_scales(Emitter(builder, lanes.literal_value), *_unpacked(builder, args[2]))
        return context.get_dummy_value()

    return types.void(lanes, sources, addresses), generate


def _unpacked(builder: Any, values: Any) -> list[Any]:
    return [builder.extract_value(values, k) for k in range(values.type.count)]


_pack_row = _row_intrinsic(rows.emit_pack)
_row_energy = _row_intrinsic(rows.emit_energy)
_unpack_row = _row_intrinsic(rows.emit_unpack)
_scales: Any = intrinsic(prefer_literal=True)(_typed_scales)


def _pack_function(bits: int, dim: int, dtype: int) -> Any:
    sources, row_nbytes, value_nbytes = SOURCES, bits * dim // 8, _value_nbytes(dtype)

    def pack(source: Any, payload: Any, packed_at: int, scales_at: int) -> None:
        if source.size and source.strides[2] != value_nbytes:
            raise ValueError("the values of a row have to lie side by side in memory")
        scratch = np.empty((2, BLOCK_ROWS), np.float32)
        norms, energies = scratch.ctypes.data, scratch[1].ctypes.data
        packed, scales = payload.ctypes.data + packed_at, payload.ctypes.data + scales_at
        for head in range(source.shape[0]):
            row = source.ctypes.data + head * source.strides[0]
            for first in range(0, source.shape[1], BLOCK_ROWS):
                count = min(source.shape[1] - first, BLOCK_ROWS)
                for i in range(count):
                    target = packed + i * row_nbytes
                    _pack_row(bits, dim, dtype, sources, (row, target, norms + 4 * i))
                    row += source.strides[1]
                for i in range(count):
                    target = packed + i * row_nbytes
                    _row_energy(bits, dim, dtype, sources, (target, energies + 4 * i))
                whole = count - count % 16
                for i in range(0, whole, 16):
                    target = scales + i * SCALE_NBYTES
                    _scales(16, sources, (norms + 4 * i, energies + 4 * i, target))
                for i in range(whole, count):
                    target = scales + i * SCALE_NBYTES
                    _scales(1, sources, (norms + 4 * i, energies + 4 * i, target))
                packed += count * row_nbytes
                scales += count * SCALE_NBYTES

    return _compile(pack, types.void(_array(dtype, True), _bytes(False), types.intp, types.intp))


def _unpack_function(bits: int, dim: int, dtype: int) -> Any:
    sources, row_nbytes, value_nbytes = SOURCES, bits * dim // 8, _value_nbytes(dtype)

    def unpack(payload: Any, packed_at: int, scales_at: int, out: Any) -> None:
        if out.size and out.strides[2] != value_nbytes:
            raise ValueError("the values of a row have to lie side by side in memory")
        packed, scale = payload.ctypes.data + packed_at, payload.ctypes.data + scales_at
        for head in range(out.shape[0]):
            row = out.ctypes.data + head * out.strides[0]
            for _ in range(out.shape[1]):
                _unpack_row(bits, dim, dtype, sources, (packed, scale, row))
                row += out.strides[1]
                packed += row_nbytes
                scale += SCALE_NBYTES

    return _compile(unpack, types.void(_bytes(True), types.intp, types.intp, _array(dtype, False)))


def _value_nbytes(dtype: int) -> int:
    return NUMPY_DTYPES[DTYPES[dtype]].itemsize


def _array(dtype: int, readonly: bool) -> Any:
    return types.Array(ELEMENTS[DTYPES[dtype]], 3, "A", readonly=readonly)


def _bytes(readonly: bool) -> Any:
    return types.Array(types.uint8, 1, "C", readonly=readonly)


def _compile(function: Callable[..., None], signature: Any) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(signature, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it may write its cache to
        return njit(signature, **options)(function)


@dataclass(frozen=True)
class NumbaKernel:
    """Implements ``kvstore.codecs.backend.ArrayKernel``."""

    pack_rows: Any
    unpack_rows: Any

    def pack(self, source: np.ndarray, payload: np.ndarray, slot: ArraySlot) -> None:
        self.pack_rows(_bit_patterns(source), payload, slot.packed_at, slot.scales_at)

    def unpack(self, payload: np.ndarray, slot: ArraySlot, out: np.ndarray) -> None:
        self.unpack_rows(payload, slot.packed_at, slot.scales_at, _bit_patterns(out))


def compile_kernel(num_bits: int, dim: int, dtype: DType) -> NumbaKernel:
    """Seconds the first time on a machine, milliseconds from numba's cache."""
    shape = (num_bits, dim, DTYPES.index(dtype))
    return NumbaKernel(_pack_function(*shape), _unpack_function(*shape))


def _bit_patterns(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == np.float16 else array
