"""The payload of a segment of rotated rows in a staging region, for the codec's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engines.vllm_plugin.device.kernels.triton_rows import TritonRows
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.layouts.kept_rows import KeptRows, fetch_rows, put_rows
from engines.vllm_plugin.device.layouts.staging_layout import TokenRun, device_table
from kvstore.codecs.rows.payload import KEPT_DTYPE, PayloadPlan
from kvstore.codecs.rows.row_codec import RowCodec


class RowSegmentLayout:
    """Implements ``SegmentLayout``: a payload of rotated rows without its kept rows.

    Args:
        plan: of the segment, which has no first tokens of a session.
        skipped: tokens of the blob before the segment.
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
