"""Chooses the implementation that packs an array: kernels if numba can compile them, else numpy.

Both give the same bytes. numba is optional; without it everything works, but slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.loops.compiled import compiled_module, proven
from kvstore.codecs.rows.payload import ArraySlot, SlotGroup, plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_format import RowFormat
from kvstore.shapes import DType, KVLayer, KVLayout

KERNELS: Final = "kvstore.codecs.kernels.rows.numba_kernel"
BLOCK_ROWS = 512  # rows at a time, so that the fp32 intermediates stay in the cache


class ArrayKernel(Protocol):
    """Packs all K and V of one dimension; one per row format, dimension and dtype."""

    def pack(self, sources: Sequence[np.ndarray], payload: np.ndarray, group: SlotGroup) -> None:
        """Write packed rows and scales of ``sources`` into the slots of ``group`` in ``payload``.

        Each source is (num_heads, num_tokens, dim) in the engine's dtype, with any strides between
        heads and tokens; its rows are contiguous. ``payload``: uint8 (nbytes,).
        """

    def unpack(
        self, payloads: Sequence[np.ndarray], group: SlotGroup, outs: Sequence[np.ndarray]
    ) -> None:
        """Fill ``outs``, arrays of the form that ``pack`` takes, from the slots of ``group``.

        ``payloads``: uint8 (nbytes,) each; their tokens follow one another. Rows whose scale is
        zero become finite values without meaning.
        """


Backend: TypeAlias = Callable[[RowFormat, int, DType], ArrayKernel]


@dataclass(frozen=True)
class ReferenceKernel:
    """Packs with numpy, block by block. Implements ``ArrayKernel``."""

    rows: RowFormat
    dtype: DType

    def pack(self, sources: Sequence[np.ndarray], payload: np.ndarray, group: SlotGroup) -> None:
        for source, slot in zip(sources, group.slots, strict=True):
            self._pack(source, payload, slot)

    def unpack(
        self, payloads: Sequence[np.ndarray], group: SlotGroup, outs: Sequence[np.ndarray]
    ) -> None:
        for out, slot in zip(outs, group.slots, strict=True):
            for number, payload in enumerate(payloads):
                first = number * slot.num_tokens
                self._unpack(payload, slot, out[:, first : first + slot.num_tokens])

    def _pack(self, source: np.ndarray, payload: np.ndarray, slot: ArraySlot) -> None:
        flat = source.reshape(slot.num_rows, slot.dim)
        packed, scales = slot.packed(payload), slot.scales(payload)
        for block in _blocks(slot.num_rows):
            stored = floats.to_stored(flat[block], self.dtype)
            packed[block], scales[block] = self.rows.pack(floats.widen(stored, self.dtype))

    def _unpack(self, payload: np.ndarray, slot: ArraySlot, out: np.ndarray) -> None:
        packed, scales = slot.packed(payload), slot.scales(payload)
        flat = np.empty((slot.num_rows, slot.dim), out.dtype)
        for block in _blocks(slot.num_rows):
            values = self.rows.unpack(packed[block], scales[block], slot.dim)
            flat[block] = floats.narrow(values, self.dtype)
        out[:] = flat.reshape(out.shape)


def _blocks(num_rows: int) -> Iterator[slice]:
    return (slice(i, i + BLOCK_ROWS) for i in range(0, num_rows, BLOCK_ROWS))


@functools.cache
def reference_kernel(rows: RowFormat, dim: int, dtype: DType) -> ArrayKernel:
    """Return the numpy implementation, which is the definition."""
    return ReferenceKernel(rows, dtype)


@functools.cache
def best_kernel(rows: RowFormat, dim: int, dtype: DType) -> ArrayKernel:
    """Return a compiled kernel if it agrees with numpy on this host, else numpy.

    Compiles on the first call for a format, dimension and dtype; see ``presets.warm``.
    """
    reference = ReferenceKernel(rows, dtype)
    compiled = compiled_module(KERNELS)
    if compiled is None or not isinstance(rows, RotatedRows) or not compiled.has_kernel(dim):
        return reference
    kernel: ArrayKernel = compiled.compile_kernel(rows.num_bits, dim, dtype)
    called = f"{rows} kernels of {dim} {dtype} values"
    return proven(kernel, reference, lambda x: agree(x, reference, rows, dim, dtype), called)


def agree(
    kernel: ArrayKernel, reference: ArrayKernel, rows: RowFormat, dim: int, dtype: DType
) -> bool:
    """Return whether both give the same bytes for a few rows."""
    layout = KVLayout(dtype, (KVLayer(1, dim, dim),))
    (source, second), *outs = (layout.empty(40)[0] for _ in range(3))
    ramp = np.arange(source.size, dtype=np.float32).reshape(source.shape)
    values = np.sin(ramp * ramp)
    source[:] = values if dtype == "float32" else floats.narrow(values, dtype)
    second[:] = source[:, ::-1]
    plan = plan_payload(rows, layout, 40, 1 << 20)
    payloads = [np.zeros(plan.nbytes, np.uint8) for _ in outs]
    for packer, payload, out in zip((kernel, reference), payloads, outs, strict=True):
        packer.pack((source, second), payload, plan.groups[0])
        packer.unpack([payload], plan.groups[0], out)
    return all(a.tobytes() == b.tobytes() for a, b in (payloads, *zip(*outs, strict=True)))
