"""Computes where each part of a row codec's payload lies.

    sink rows | scales | packed rows | kept rows

- *Sink rows*: the first four tokens of a session, unquantised (16 bits per value). Attention gives
  them far more weight than any other token.
- *Scales* and *packed rows* of all other tokens: for each layer K then V, head by head, token by
  token, so that a kernel goes through one long range.
- *Kept rows*: the rows whose scale is zero, unquantised, in the same order.

Only the number of kept rows depends on the values, so the payload has no header: layout, number of
tokens and first position determine every offset, and the scales determine the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.base import num_sinks
from kvstore.codecs.rows.row_format import RowFormat
from kvstore.shapes import KVLayout

KEPT_DTYPE = np.dtype("<u2")  # of an unquantised value


@dataclass(frozen=True)
class ArraySlot:
    """The shape of one layer's K or V, and the byte offsets of its sinks, scales and rows."""

    num_heads: int
    num_sinks: int
    num_tokens: int  # after the sinks
    dim: int
    first_row: int  # among the packed rows of the whole payload
    row_nbytes: int  # of a packed row
    scale_dtype: np.dtype
    sinks_at: int
    scales_at: int
    packed_at: int

    @property
    def num_rows(self) -> int:
        """The number of packed rows: one for each head and token after the sinks.

        A side without values has none.
        """
        return self.num_heads * self.num_tokens if self.dim else 0

    def sinks(self, payload: np.ndarray) -> np.ndarray:
        """Return a view of the sink rows, uint16 (num_heads, num_sinks, dim)."""
        shape = (self.num_heads, self.num_sinks, self.dim)
        return _view(payload, self.sinks_at, shape, KEPT_DTYPE)

    def scales(self, payload: np.ndarray) -> np.ndarray:
        """Return a view of the scales, (num_rows,)."""
        return _view(payload, self.scales_at, (self.num_rows,), self.scale_dtype)

    def packed(self, payload: np.ndarray) -> np.ndarray:
        """Return a view of the packed rows, uint8 (num_rows, row_nbytes)."""
        shape = (self.num_rows, self.row_nbytes)
        return _view(payload, self.packed_at, shape, np.dtype(np.uint8))

    def positions(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return heads and tokens of rows, int64 (rows,) each.

        Tokens are counted from the first sink.
        """
        heads, tokens = np.divmod(rows, self.num_tokens)
        return heads, tokens + self.num_sinks


@dataclass(frozen=True, eq=False)
class SlotGroup:
    """All slots of one dimension, which one kernel call handles together."""

    dim: int
    numbers: tuple[int, ...]  # among all slots
    slots: tuple[ArraySlot, ...]
    offsets: np.ndarray  # int64 (num_slots, 2): packed_at, scales_at


@dataclass(frozen=True, eq=False)
class PayloadPlan:
    """The slots of all arrays of a run, and the offset of their scales."""

    slots: tuple[ArraySlot, ...]  # K and V of the first layer, of the second, ...
    groups: tuple[SlotGroup, ...]
    num_sinks: int
    scale_dtype: np.dtype
    scales_at: int
    num_rows: int
    nbytes: int  # without kept rows; they follow

    def scales(self, payload: np.ndarray) -> np.ndarray:
        """Return a view of the scales of all slots, (num_rows,)."""
        return _view(payload, self.scales_at, (self.num_rows,), self.scale_dtype)

    def kept_rows(self, payload: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows whose scale is zero, ascending.

        There is hardly ever one.
        """
        scales = self.scales(payload)
        if np.count_nonzero(scales) == len(scales):
            return np.empty(0, np.intp)
        return np.flatnonzero(scales == 0)

    def split_rows(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield ascending row numbers as (slot number, row numbers in that slot)."""
        if not len(rows):
            return
        starts = [slot.first_row for slot in self.slots]
        owners = np.searchsorted(starts, rows, side="right") - 1
        for number in np.unique(owners):
            yield int(number), rows[owners == number] - starts[number]


def plan_payload(
    rows: RowFormat, layout: KVLayout, num_tokens: int, first_token: int
) -> PayloadPlan:
    """Plan ``num_tokens`` tokens of every layer, the first of them at ``first_token``."""
    return _plan(rows, layout, num_tokens, num_sinks(num_tokens, first_token))


# The first token is not an argument, because every chunk of a long session has a different one.
@functools.lru_cache(maxsize=64)
def _plan(rows: RowFormat, layout: KVLayout, num_tokens: int, sinks: int) -> PayloadPlan:
    shapes = list(_array_shapes(layout))
    num_packed = num_tokens - sinks
    scale_dtype = rows.scale_dtype
    num_rows = sum(heads for heads, dim in shapes if dim) * num_packed
    elements = sum(heads * dim for heads, dim in shapes)
    scales_at = sinks * elements * KEPT_DTYPE.itemsize
    row, sinks_at, packed_at = 0, 0, scales_at + num_rows * scale_dtype.itemsize
    slots = []
    for heads, dim in shapes:
        slot = ArraySlot(
            num_heads=heads,
            num_sinks=sinks,
            num_tokens=num_packed,
            dim=dim,
            first_row=row,
            row_nbytes=rows.packed_nbytes(dim),
            scale_dtype=scale_dtype,
            sinks_at=sinks_at,
            scales_at=scales_at + row * scale_dtype.itemsize,
            packed_at=packed_at,
        )
        slots.append(slot)
        row += slot.num_rows
        sinks_at += heads * sinks * dim * KEPT_DTYPE.itemsize
        packed_at += slot.num_rows * slot.row_nbytes
    groups = tuple(_group(slots, dim) for dim in sorted({slot.dim for slot in slots} - {0}))
    return PayloadPlan(tuple(slots), groups, sinks, scale_dtype, scales_at, num_rows, packed_at)


def _group(slots: list[ArraySlot], dim: int) -> SlotGroup:
    numbers = tuple(number for number, slot in enumerate(slots) if slot.dim == dim)
    members = tuple(slots[number] for number in numbers)
    offsets = np.array([(slot.packed_at, slot.scales_at) for slot in members], np.int64)
    return SlotGroup(dim, numbers, members, offsets)


def _array_shapes(layout: KVLayout) -> Iterator[tuple[int, int]]:
    for layer in layout.layers:
        yield layer.num_kv_heads, layer.head_dim
        yield layer.num_kv_heads, layer.value_dim


def _view(payload: np.ndarray, at: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    return payload[at : at + nbytes].view(dtype).reshape(shape)
