"""Raw rows in a staging region, which the store's packer uses like the engine's arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engines.vllm_plugin.device.kernels.triton_rows import gather, scatter
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.layouts.kept_rows import KeptRows
from engines.vllm_plugin.device.layouts.staging_layout import TokenRun, device_table
from kvstore.blobs.packer import AnyBlob, Packer
from kvstore.shapes import KVLayout, KVPair
from kvstore.store.records import Span
from kvstore.tiers.base import Blob


class RawStagingLayout:
    """Raw rows: K and V of each layer, one after the other, in the order of ``RawCodec``."""

    takes_many = False

    def __init__(self, groups: Sequence[KVViewGroup], packer: Packer, num_tokens: int) -> None:
        self._groups = groups
        self._packer = packer
        self._num_tokens = num_tokens
        self.nbytes = packer.layout.bytes_per_token * num_tokens
        lengths = [0] * sum(len(x.side_numbers) for x in groups)
        for group in groups:
            for number in group.side_numbers:
                lengths[number] = group.num_elements(num_tokens)
        starts = np.cumsum([0, *lengths])
        self._offsets = [device_table(starts[list(x.side_numbers)], x) for x in groups]

    def read(self, run: TokenRun, staged: Tensor) -> None:
        for group, offsets in zip(self._groups, self._offsets, strict=True):
            gather(group, run.blocks, run.first, self._num_tokens, staged[0], offsets)

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        return b""

    def seal(self, span: Span, staged: np.ndarray, rescued: bytes) -> Blob:
        return self._packer.pack_run(span.key, self.rows(staged), span.first_token)

    def open(self, blob: AnyBlob, span: Span, staged: np.ndarray) -> list[KeptRows]:
        rows = self.rows(staged)
        self._packer.unpack_run(blob, span.key, span.first_token, self._num_tokens, rows)
        return []

    def write(self, run: TokenRun, staged: Tensor) -> None:
        for group, offsets in zip(self._groups, self._offsets, strict=True):
            scatter(group, run.blocks, run.first, self._num_tokens, staged[0], offsets)

    def write_kept(self, run: TokenRun, kept: list[KeptRows]) -> None:
        """Do nothing: a region holds any row."""

    def rows(self, staged: np.ndarray) -> list[KVPair]:
        """View the rows as the engine's arrays, (num_kv_heads, num_tokens, dim)."""
        return layer_views(staged, self._packer.layout, self._num_tokens)


def layer_views(staged: np.ndarray, layout: KVLayout, num_tokens: int) -> list[KVPair]:
    """View ``staged``, uint8, as K and V of each layer, (num_kv_heads, num_tokens, dim)."""
    at, arrays = 0, []
    for layer in layout.layers:
        for dim in (layer.head_dim, layer.value_dim):
            shape = (layer.num_kv_heads, num_tokens, dim)
            end = at + int(np.prod(shape)) * layout.numpy_dtype.itemsize
            arrays.append(staged[at:end].view(layout.numpy_dtype).reshape(shape))
            at = end
    return list(zip(arrays[::2], arrays[1::2], strict=True))
