"""A payload of rotated rows in a staging region, written and read by the codec's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engines.vllm_plugin.device.kernels.triton_rows import TritonRows, gather, scatter
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.layouts.kept_rows import KeptRows, fetch_rows, put_rows
from engines.vllm_plugin.device.layouts.staging_layout import TokenRun, device_table
from kvstore.blobs.packer import AnyBlob, Packer
from kvstore.by_blocks.names import BlobSpan
from kvstore.codecs.rows.payload import KEPT_DTYPE, PayloadPlan
from kvstore.codecs.rows.row_codec import RowCodec


class RowStagingLayout:
    """A payload of rotated rows (``kvstore.codecs.rows.payload``), without its kept rows."""

    def __init__(
        self,
        groups: Sequence[KVViewGroup],
        kernels: Sequence[TritonRows],
        packer: Packer,
        codec: RowCodec,
        plan: PayloadPlan,
    ) -> None:
        self._groups = groups
        self._kernels = kernels
        self._packer = packer
        self._codec = codec
        self._plan = plan
        self._num_tokens = plan.num_sinks + plan.slots[0].num_tokens
        self.nbytes = plan.nbytes
        slots = [[plan.slots[i] for i in x.side_numbers] for x in groups]
        rows = [[(s.packed_at, s.scales_at // 2) for s in x] for x in slots]
        self._rows = [device_table(x, group) for x, group in zip(rows, groups, strict=True)]
        sinks = [[s.sinks_at // 2 for s in x] for x in slots]
        self._sinks = [device_table(x, group) for x, group in zip(sinks, groups, strict=True)]

    def read(self, run: TokenRun, staged: Tensor) -> None:
        start = run.first + self._plan.num_sinks
        for i, group in enumerate(self._groups):
            if self._plan.num_sinks:
                gather(group, run.blocks, run.first, self._plan.num_sinks, staged, self._sinks[i])
            if self._num_packed:
                self._kernels[i].pack(
                    group, run.blocks, start, self._num_packed, staged, self._rows[i]
                )

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        found = []
        for number, rows in self._plan.split_rows(self._plan.kept_rows(staged)):
            slot = self._plan.slots[number]
            slot.packed(staged)[rows] = 0
            values = fetch_rows(self._groups, number, block_ids, *slot.positions(rows))
            found.append(values.tobytes())
        return b"".join(found)

    def seal(self, span: BlobSpan, first_token: int, staged: np.ndarray, rescued: bytes) -> bytes:
        payload = b"".join((staged.data, rescued)) if rescued else staged.data
        return self._packer.seal_run(span.key, payload, first_token, self._num_tokens, self._codec)

    def open(
        self, blob: AnyBlob, span: BlobSpan, first_token: int, staged: np.ndarray
    ) -> list[KeptRows]:
        payload = self._packer.open_run(blob, span.key, first_token, self._num_tokens, self._codec)
        view = np.frombuffer(payload, np.uint8)
        kept = self._codec.check_payload(view, self._plan)
        staged[:] = view[: self.nbytes]
        return self._kept(kept, view)

    def write(self, run: TokenRun, staged: Tensor, kept: list[KeptRows]) -> None:
        start = run.first + self._plan.num_sinks
        for i, group in enumerate(self._groups):
            if self._plan.num_sinks:
                scatter(group, run.blocks, run.first, self._plan.num_sinks, staged, self._sinks[i])
            if self._num_packed:
                self._kernels[i].unpack(
                    group, run.blocks, start, self._num_packed, staged, self._rows[i]
                )
        for rows in kept:
            put_rows(self._groups, rows, run.blocks, run.first)

    @property
    def _num_packed(self) -> int:
        return self._num_tokens - self._plan.num_sinks

    def _kept(self, kept: np.ndarray, payload: np.ndarray) -> list[KeptRows]:
        at, found = self.nbytes, []
        for number, rows in self._plan.split_rows(kept):
            slot = self._plan.slots[number]
            end = at + len(rows) * slot.dim * KEPT_DTYPE.itemsize
            values = payload[at:end].view(KEPT_DTYPE).reshape(len(rows), slot.dim).copy()
            found.append(KeptRows(number, *slot.positions(rows), values))
            at = end
        return found
