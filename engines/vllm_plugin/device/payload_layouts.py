"""The layouts of a codec's payload in a staging region: rotated rows, or a calibrated fixed rate.

    region of a fixed rate: gains and planes as in a payload without kept rows | a bit for each row

The bits mark *kept rows*, which cannot be packed. They are very rare; their values are fetched from
the blocks, and the host then assembles the payload. Keys of a fixed rate are rotated by ``Angles``:
the host's cosines and sines, uploaded when first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.device.accelerator import sent
from engines.vllm_plugin.device.kernels.triton_rates import (
    RatePlaces,
    RateRun,
    TritonRates,
    rate_tables,
    ropes_of,
    vector_of,
)
from engines.vllm_plugin.device.kernels.triton_rows import TritonRows
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.staging_layout import (
    KeptRows,
    TokenRun,
    device_table,
    fetch_rows,
    put_rows,
)
from kvstore.codecs import floats
from kvstore.codecs.fixed_rate.rate_pipeline import Kept, RatePayload, RatePipeline
from kvstore.codecs.rows.payload import KEPT_DTYPE, PayloadPlan
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.shapes import KVLayout, Rope, angle_tables

PAGE_TOKENS: Final = 512  # tokens in a table of angles
KEPT_TABLES: Final = 32  # cached tables; 8 MB in all for one RoPE and heads of 128 channels


class Angles:
    """Provides the angles of runs of tokens to the kernels of one stream, and caches some.

    Math libraries differ in the last bit, so the device never computes angles. A table covers a
    page of positions, so that all sessions share it. Each stream needs an object of its own: memory
    of evicted tables is reused in the order of this stream only.
    """

    def __init__(self, ropes: Sequence[Rope], device: torch.device) -> None:
        self._ropes = tuple(ropes)
        self._device = device
        self.half: Final = max((len(x.frequencies) for x in ropes), default=1)
        self._of = lru_cache(maxsize=KEPT_TABLES)(self._new)

    def of(self, position: int, count: int) -> tuple[Tensor, int]:
        """Return a table of cosines and sines, and the place in it of token ``position``.

        The table is fp32 (ropes, 2, num_tokens, half) and covers ``count`` tokens from there on.
        """
        first = position - position % PAGE_TOKENS
        if position + count <= first + PAGE_TOKENS:
            return self._of(first, PAGE_TOKENS), position - first
        return self._of(position, count), 0

    def _new(self, position: int, count: int) -> Tensor:
        tables = np.zeros((max(len(self._ropes), 1), 2, count, self.half), np.float32)
        for table, rope in zip(tables, self._ropes, strict=False):
            for part, values in zip(table, angle_tables(rope, position, count), strict=True):
                part[:, : values.shape[1]] = values
        return sent(torch.from_numpy(tables), self._device)


class RowPayloadLayout:
    """Implements ``PayloadLayout``: a payload of rotated rows without its kept rows.

    Args:
        plan: the plan of the payload, which does not include a session's first tokens.
        skipped: the number of the blob's tokens before those of the payload.
    """

    def __init__(
        self,
        groups: Sequence[KVViewGroup],
        kernels: Sequence[TritonRows],
        codec: RowCodec,
        plan: PayloadPlan,
        skipped: int,
    ) -> None:
        self._groups = groups
        self._kernels = kernels
        self._codec = codec
        self._plan = plan
        self._skipped = skipped
        self._num_tokens = plan.slots[0].num_tokens
        self.nbytes = plan.nbytes
        slots = [[plan.slots[i] for i in x.side_numbers] for x in groups]
        rows = [[(s.packed_at, s.scales_at // 2) for s in x] for x in slots]
        self._offsets = [device_table(x, group) for x, group in zip(rows, groups, strict=True)]

    def read(self, run: TokenRun, staged: Tensor) -> None:
        first = run.first + self._skipped
        for group, kernels, at in zip(self._groups, self._kernels, self._offsets, strict=True):
            kernels.pack(group, run.blocks, first, self._num_tokens, staged, at)

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        found = []
        for number, rows in self._plan.split_rows(self._plan.kept_rows(staged)):
            slot = self._plan.slots[number]
            slot.packed(staged)[rows] = 0
            heads, tokens = slot.positions(rows)
            values = fetch_rows(self._groups, number, block_ids, heads, tokens + self._skipped)
            found.append(values.tobytes())
        return b"".join(found)

    def payload_of(self, staged: np.ndarray, rescued: bytes) -> bytes | memoryview:
        return b"".join((staged.data, rescued)) if rescued else staged.data

    def stage(self, payload: memoryview, staged: np.ndarray) -> list[KeptRows]:
        view = np.frombuffer(payload, np.uint8)
        kept = self._codec.check_payload(view, self._plan)
        staged[:] = view[: self.nbytes]
        return self._kept(kept, view)

    def write(self, run: TokenRun, staged: Tensor) -> None:
        first = run.first + self._skipped
        for group, kernels, at in zip(self._groups, self._kernels, self._offsets, strict=True):
            kernels.unpack(group, run.blocks, first, self._num_tokens, staged, at)

    def write_kept(self, run: TokenRun, kept: list[KeptRows]) -> None:
        for rows in kept:
            put_rows(self._groups, rows, run.blocks, run.first)

    def _kept(self, kept: np.ndarray, payload: np.ndarray) -> list[KeptRows]:
        at, found = self.nbytes, []
        for number, rows in self._plan.split_rows(kept):
            slot = self._plan.slots[number]
            end = at + len(rows) * slot.dim * KEPT_DTYPE.itemsize
            values = payload[at:end].view(KEPT_DTYPE).reshape(len(rows), slot.dim).copy()
            heads, tokens = slot.positions(rows)
            found.append(KeptRows(number, heads, tokens + self._skipped, values))
            at = end
        return found


@dataclass(frozen=True, eq=False)
class GroupRates:
    """The kernels of one group of sides, the number of its stack, and the angles per direction."""

    group: KVViewGroup
    stack: int
    kernels: TritonRates
    for_reading: Angles
    for_writing: Angles


def group_rates(
    groups: Sequence[KVViewGroup], pipelines: Sequence[RatePipeline], dtype: torch.dtype
) -> list[GroupRates] | None:
    """Copy the tables of all stacks to the device, and return the kernels of each group of sides.

    Returns None if a stack has no kernels.
    """
    if not pipelines or not all(TritonRates.supports(x.shape.width, dtype) for x in pipelines):
        return None
    found = []
    for stack, pipeline in enumerate(pipelines):
        members = [x for x in groups if x.dim == pipeline.shape.width]
        device, ropes = groups[0].starts.device, ropes_of(pipeline)
        tables = rate_tables(pipeline, ropes, device)
        if tables is None:
            return None
        angles = Angles(ropes, device), Angles(ropes, device)
        for group in members:
            units = torch.tensor(_first_units(pipeline, group), dtype=torch.int32, device=device)
            kernels = TritonRates(group, units, tables, dtype)
            found.append(GroupRates(group, stack, kernels, *angles))
    return found


def _first_units(pipeline: RatePipeline, group: KVViewGroup) -> list[int]:
    """Return the number of each side's first unit; a side has one unit per head, in order."""
    vectors = [vector_of(pipeline.shape, unit) for unit in range(pipeline.shape.num_units)]
    firsts = {x.array: unit for unit, x in enumerate(vectors) if x.head == 0}
    return [firsts[number] for number in group.side_numbers]


class RatePayloadLayout:
    """Implements ``PayloadLayout`` for a calibrated fixed rate.

    Args:
        layout: the layout of the engine's rows.
        plan: the plan of the payload, which does not include a session's first tokens.
        skipped: the number of the blob's tokens before those of the payload.
    """

    def __init__(
        self, rates: Sequence[GroupRates], layout: KVLayout, plan: RatePayload, skipped: int
    ) -> None:
        self._rates = rates
        self._groups = [x.group for x in rates]
        self._layout = layout
        self._plan = plan
        self._skipped = skipped
        sizes = [x.shape.num_units * _bytes_of(plan.num_tokens) for x in plan.pipelines]
        self._flags_at = np.cumsum([plan.nbytes, *sizes]).tolist()
        self.nbytes: int = self._flags_at[-1]
        self._places = [
            RatePlaces(x.pairs_at, x.planes_at, flags)
            for x, flags in zip(plan.stacks, self._flags_at, strict=False)
        ]

    def read(self, run: TokenRun, staged: Tensor) -> None:
        for rates in self._rates:
            tokens = self._tokens(run, rates.for_reading, len(staged))
            rates.kernels.pack(tokens, staged, self._places[rates.stack])

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        found = []
        for stack, numbers in enumerate(self._kept_numbers(staged)):
            for number in numbers.tolist():
                side, head, token = self._place_of(stack, number)
                at = (np.array([head]), np.array([token]))
                bits = fetch_rows(self._groups, side, block_ids, *at)
                values = bits.view(self._layout.numpy_dtype)
                found.append(floats.to_stored(values, self._layout.dtype).tobytes())
        return b"".join(found)

    def payload_of(self, staged: np.ndarray, rescued: bytes) -> bytes | memoryview:
        plain = staged[: self._plan.nbytes]
        if rescued:
            return self._plan.join(plain, self._kept_of(staged, rescued))
        for place in self._plan.stacks:
            plain[place.count_at : place.pairs_at] = 0
        return plain.data

    def stage(self, payload: memoryview, staged: np.ndarray) -> list[KeptRows]:
        kept = self._plan.split(payload, staged[: self._plan.nbytes])
        return [rows for stack, some in enumerate(kept) for rows in self._rows_of(stack, some)]

    def write(self, run: TokenRun, staged: Tensor) -> None:
        for rates in self._rates:
            tokens = self._tokens(run, rates.for_writing, len(staged))
            rates.kernels.unpack(tokens, staged, self._places[rates.stack])

    def write_kept(self, run: TokenRun, kept: list[KeptRows]) -> None:
        for rows in kept:
            put_rows(self._groups, rows, run.blocks, run.first)

    def _tokens(self, run: TokenRun, angles: Angles, num_chunks: int) -> RateRun:
        count = self._plan.num_tokens
        table, first_angle = angles.of(run.position + self._skipped, num_chunks * count)
        return RateRun(run.blocks, run.first + self._skipped, count, table, first_angle)

    def _kept_numbers(self, staged: np.ndarray) -> list[np.ndarray]:
        """Return the numbers of the kept rows of each stack, int64, as in ``Kept``."""
        found = []
        for pipeline, at in zip(self._plan.pipelines, self._flags_at, strict=False):
            units, count = pipeline.shape.num_units, self._plan.num_tokens
            flags = staged[at : at + units * _bytes_of(count)]
            if not flags.any():
                found.append(np.empty(0, np.int64))
                continue
            bits = np.unpackbits(flags.reshape(units, -1), axis=1, bitorder="little")
            found.append(np.flatnonzero(bits[:, :count]))
        return found

    def _kept_of(self, staged: np.ndarray, rescued: bytes) -> list[Kept]:
        values, at, kept = np.frombuffer(rescued, "<u2"), 0, []
        for pipeline, numbers in zip(self._plan.pipelines, self._kept_numbers(staged), strict=True):
            width = pipeline.shape.width
            end = at + len(numbers) * width
            kept.append(Kept(numbers, values[at:end].reshape(-1, width)))
            at = end
        return kept

    def _rows_of(self, stack: int, kept: Kept) -> list[KeptRows]:
        found = []
        for number, values in zip(kept.numbers.tolist(), kept.values, strict=True):
            side, head, token = self._place_of(stack, number)
            found.append(KeptRows(side, np.array([head]), np.array([token]), values[None]))
        return found

    def _place_of(self, stack: int, number: int) -> tuple[int, int, int]:
        """Return side, head and token of a kept row; tokens are counted from the blob's first."""
        unit, token = divmod(number, self._plan.num_tokens)
        vector = vector_of(self._plan.pipelines[stack].shape, unit)
        return vector.array, vector.head, token + self._skipped


def _bytes_of(num_bits: int) -> int:
    return -(-num_bits // 8)
