"""The codec that packs every row by itself, and its presets that need no profile."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.base import Codec, Payload, check_run, num_sinks
from kvstore.codecs.rows.backend import Backend, best_kernel
from kvstore.codecs.rows.payload import KEPT_DTYPE, PayloadPlan, SlotGroup, plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_format import PlainRows, RowFormat
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import DType, KVLayout, KVRun


@dataclass(frozen=True)
class RowCodec:
    """Packs runs row by row. Implements ``kvstore.codecs.base.Codec`` for a row format."""

    id: str
    rows: RowFormat
    backend: Backend = best_kernel
    exact: bool = False

    def check(self, layout: KVLayout) -> None:
        for layer in layout.layers:
            for dim in filter(None, (layer.head_dim, layer.value_dim)):
                if not self.rows.supports(dim):
                    raise UnknownCodec(
                        f"codec {self.id} cannot pack vectors of {dim} values; use codec raw"
                    )

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return plan_payload(self.rows, layout, num_tokens, first_token).nbytes

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        sinks = num_sinks(num_tokens, first_token)
        exact = sinks * layout.elements_per_token * KEPT_DTYPE.itemsize
        return exact + (num_tokens - sinks) * _token_nbytes(self.rows, layout)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
        plan = plan_payload(self.rows, layout, check_run(run, layout), first_token)
        payload = np.empty(plan.nbytes, np.uint8)
        arrays = _arrays(run)
        if plan.num_sinks:
            for array, slot in zip(arrays, plan.slots, strict=True):
                sinks = array[:, : slot.num_sinks]
                slot.sinks(payload)[:] = floats.to_stored(sinks, layout.dtype)
        for group in plan.groups:
            kernel = self.backend(self.rows, group.dim, layout.dtype)
            kernel.pack(_after_sinks(arrays, plan, group), payload, group)
        kept = list(keep_rows(arrays, plan, payload, layout.dtype))
        return b"".join([payload.data, *kept]) if kept else payload.data

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        self.decode_chunks([payload], layout, first_token, out)

    def decode_chunks(
        self, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
    ) -> None:
        """Implement ``ChunksCodec``."""
        num_tokens = check_run(out, layout) // len(payloads)
        plan = plan_payload(self.rows, layout, num_tokens, first_token)
        views = [np.frombuffer(payload, np.uint8) for payload in payloads]
        unpacked = [self.check_payload(view, plan) for view in views]
        arrays = _arrays(out)
        if plan.num_sinks:
            for array, slot in zip(arrays, plan.slots, strict=True):
                sinks = slot.sinks(views[0])
                array[:, : slot.num_sinks] = floats.from_stored(sinks, layout.dtype)
        for group in plan.groups:
            kernel = self.backend(self.rows, group.dim, layout.dtype)
            kernel.unpack(views, group, _after_sinks(arrays, plan, group))
        for number, (view, rows) in enumerate(zip(views, unpacked, strict=True)):
            if len(rows):
                own = [array[:, number * num_tokens :] for array in arrays]
                restore_rows(rows, view, plan, own, layout.dtype)

    def check_payload(self, payload: np.ndarray, plan: PayloadPlan) -> np.ndarray:
        """Check a payload and return the numbers of the rows that were stored unquantised.

        ``payload``: uint8 (nbytes,).

        Raises:
            Corrupt: this codec writes no payload of its length, or with one of its scales.
        """
        if len(payload) < plan.nbytes:
            raise Corrupt(f"payload of {len(payload)} bytes, at least {plan.nbytes} expected")
        scales = plan.scales(payload)
        if len(payload) == plan.nbytes and self.rows.are_all_packed(scales):
            return np.empty(0, np.intp)
        if not self.rows.are_scales(scales):
            raise Corrupt(f"a scale is one that codec {self.id} never writes")
        kept = plan.kept_rows(payload)
        nbytes = plan.nbytes + sum(
            len(rows) * plan.slots[number].dim * KEPT_DTYPE.itemsize
            for number, rows in plan.split_rows(kept)
        )
        if len(payload) != nbytes:
            raise Corrupt(f"payload of {len(payload)} bytes, {nbytes} expected")
        return kept


@functools.lru_cache(maxsize=64)
def _token_nbytes(rows: RowFormat, layout: KVLayout) -> int:
    """Return the bytes of a packed token."""
    sides = ((x.num_kv_heads, dim) for x in layout.layers for dim in (x.head_dim, x.value_dim))
    scale = rows.scale_dtype.itemsize
    return sum(heads * (rows.packed_nbytes(dim) + scale) for heads, dim in sides if dim)


def lm3() -> Codec:
    """Make ``lm3``: three bits, unrotated, the control; 5.12x over bf16 at 256 values per row."""
    return RowCodec("lm3.1", PlainRows())


def tq3() -> Codec:
    """Make ``tq3``: three bits, rotated; 4.92x over bf16 at 64 values per row, 5.12x at 128."""
    return RowCodec("tq3.2", RotatedRows(3))


def tq4() -> Codec:
    """Make ``tq4``: four bits, rotated; 3.76x over bf16 at 64 values per row, 3.88x at 128."""
    return RowCodec("tq4.2", RotatedRows(4))


def dense3() -> Codec:
    """Make ``dense3`` for a model without a profile: the arithmetic of ``tq3``."""
    return RowCodec("dense3.2", RotatedRows(3))


def _arrays(run: KVRun) -> list[np.ndarray]:
    return [array for pair in run for array in pair]


def _after_sinks(arrays: list[np.ndarray], plan: PayloadPlan, group: SlotGroup) -> list[np.ndarray]:
    if not plan.num_sinks:
        return [arrays[number] for number in group.numbers]
    return [arrays[number][:, plan.num_sinks :] for number in group.numbers]


def keep_rows(
    arrays: list[np.ndarray], plan: PayloadPlan, payload: np.ndarray, dtype: DType
) -> Iterator[memoryview]:
    """Yield the rows that could not be packed, unquantised; their packed bytes become zero."""
    unpacked = plan.kept_rows(payload)
    for number, rows in plan.split_rows(unpacked):
        slot = plan.slots[number]
        slot.packed(payload)[rows] = 0
        values = arrays[number][slot.positions(rows)]
        yield floats.to_stored(values, dtype).data


def restore_rows(
    unpacked: np.ndarray,
    payload: np.ndarray,
    plan: PayloadPlan,
    arrays: list[np.ndarray],
    dtype: DType,
) -> None:
    """Put back the rows that ``keep_rows`` took, by their numbers."""
    at = plan.nbytes
    for number, rows in plan.split_rows(unpacked):
        slot = plan.slots[number]
        end = at + len(rows) * slot.dim * KEPT_DTYPE.itemsize
        stored = payload[at:end].view(KEPT_DTYPE).reshape(len(rows), slot.dim)
        arrays[number][slot.positions(rows)] = floats.from_stored(stored, dtype)
        at = end
