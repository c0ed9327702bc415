"""Row formats on whole arrays with numpy: the definition at work, on any machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.payload import ArraySlot, SlotGroup
from kvstore.codecs.rows import RowFormat
from kvstore.shapes import DType

BLOCK_ROWS = 512  # at a time, so that the fp32 intermediates stay in the cache


@dataclass(frozen=True)
class ReferenceKernel:
    rows: RowFormat
    dtype: DType

    def pack(self, sources: Sequence[np.ndarray], payload: np.ndarray, group: SlotGroup) -> None:
        for source, slot in zip(sources, group.slots, strict=True):
            self._pack(source, payload, slot)

    def unpack(self, payload: np.ndarray, group: SlotGroup, outs: Sequence[np.ndarray]) -> None:
        for out, slot in zip(outs, group.slots, strict=True):
            self._unpack(payload, slot, out)

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
