"""A row codec for runs that an engine keeps packed: their bytes are copied into the payload.

Rows that are not packed yet (the engine keeps its newest tokens unpacked) are packed here, for the
first time. So a session saved from a packed cache has the same bytes as if its rows had been packed
by the codec once, and no row is quantised a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.base import Codec, Payload, check_run, decode_each
from kvstore.codecs.rows.packed_layout import PackedArray, PackedLayout
from kvstore.codecs.rows.payload import ArraySlot, plan_payload
from kvstore.codecs.rows.row_codec import RowCodec, keep_rows, restore_rows
from kvstore.errors import UnknownCodec
from kvstore.shapes import DType, KVLayout, KVRun

STORED: Final[DType] = "bfloat16"  # ``exact`` rows are 16-bit patterns, copied as they are


class PackedCodec(RowCodec):
    """Packs runs of ``PackedArray``. Implements ``kvstore.codecs.base.Codec``."""

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
        arrays = _arrays(run)
        end = max(array.packed_end for array in arrays)
        if not end:  # nothing is packed: the fast path
            return super().encode(_exact_run(arrays, layout), layout, first_token)
        num_tokens = check_run(run, layout)
        plan = plan_payload(self.rows, layout, num_tokens, first_token)
        payload = np.empty(plan.nbytes, np.uint8)
        newest = [array[:, end:] for array in arrays]
        packed = super().encode(_exact_run(newest, layout), layout, first_token + end)
        view = np.frombuffer(packed, np.uint8)
        parts = plan_payload(self.rows, layout, num_tokens - end, first_token + end)
        for array, slot, part in zip(arrays, plan.slots, parts.slots, strict=True):
            self._fill(payload, array[:, :end], slot)
            _fill_newest(payload, slot, view, part)
        kept = list(keep_rows(_exact(arrays), plan, payload, STORED))
        return b"".join([payload.data, *kept]) if kept else payload.data

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        plan = plan_payload(self.rows, layout, check_run(out, layout), first_token)
        view = np.frombuffer(payload, np.uint8)
        kept = self.check_payload(view, plan)
        arrays = _arrays(out)
        for array, slot in zip(arrays, plan.slots, strict=True):
            sinks, shape = slot.num_sinks, (slot.num_heads, slot.num_tokens)
            array.exact[:, :sinks] = slot.sinks(view)
            array.scales[:, :sinks] = 0
            array.scales[:, sinks:] = slot.scales(view).reshape(shape)
            array.codes[:, sinks:] = slot.packed(view).reshape(*shape, slot.row_nbytes)
        restore_rows(kept, view, plan, _exact(arrays), STORED)

    def decode_chunks(
        self, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
    ) -> None:
        decode_each(self, payloads, layout, first_token, out)

    def _fill(self, payload: np.ndarray, array: PackedArray, slot: ArraySlot) -> None:
        """Copy the tokens before the newest, and pack single rows that are not packed yet."""
        sinks = slot.num_sinks
        # The first tokens of a session are never packed.
        if array.scales[:, :sinks].any():
            raise ValueError("the first tokens of a packed run are packed")
        slot.sinks(payload)[:] = array.exact[:, :sinks]
        count, by_head = array.shape[1] - sinks, (slot.num_heads, slot.num_tokens)
        scales = slot.scales(payload).reshape(by_head)[:, :count]
        codes = slot.packed(payload).reshape(*by_head, slot.row_nbytes)[:, :count]
        scales[:], codes[:] = array.scales[:, sinks:], array.codes[:, sinks:]
        if np.count_nonzero(scales) < scales.size:
            odd = np.nonzero(scales == 0)
            values = floats.widen(array.exact[:, sinks:][odd], array.dtype_name)
            codes[odd], scales[odd] = self.rows.pack(values)


def _fill_newest(payload: np.ndarray, slot: ArraySlot, view: np.ndarray, part: ArraySlot) -> None:
    """Copy the newest tokens, packed as ``part`` of ``view``, to the end of each head's rows."""
    if not part.num_rows:
        return
    by_head, of_part = (slot.num_heads, slot.num_tokens), (part.num_heads, part.num_tokens)
    first = slot.num_tokens - part.num_tokens
    slot.scales(payload).reshape(by_head)[:, first:] = part.scales(view).reshape(of_part)
    rows = part.packed(view).reshape(*of_part, part.row_nbytes)
    slot.packed(payload).reshape(*by_head, slot.row_nbytes)[:, first:] = rows


def packed_codec(codec: Codec, layout: PackedLayout) -> PackedCodec:
    """Make the codec for a live cache that is packed by the arithmetic of ``codec``.

    Raises:
        UnknownCodec: the cache is packed by another codec.
    """
    if isinstance(codec, RowCodec) and codec.rows == layout.rows:
        return PackedCodec(codec.id, codec.rows, codec.backend)
    name = f"tq{layout.num_bits}"
    raise UnknownCodec(
        f"a live cache packed by {name} can only be kept cold by {name}, not by {codec.id}"
    )


def _arrays(run: KVRun) -> Sequence[PackedArray]:
    return [cast(PackedArray, array) for pair in run for array in pair]


def _exact(arrays: Sequence[PackedArray]) -> list[np.ndarray]:
    return [array.exact for array in arrays]


def _exact_run(arrays: Sequence[PackedArray], layout: KVLayout) -> KVRun:
    plain = [floats.from_stored(array.exact, layout.dtype) for array in arrays]
    return list(zip(plain[::2], plain[1::2], strict=True))
