"""Chooses the staging layout of a blob: packed if the codec has kernels, else raw.

The raw layout is also that of the first chunk of a model whose tokens are so small that their first
ones have no segment of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from engines.vllm_plugin.device.kernels.triton_rows import TritonRows
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.layouts.packed_layout import (
    FirstChunkLayout,
    PackedLayout,
    SegmentLayout,
)
from engines.vllm_plugin.device.layouts.rate_segment import RateSegmentLayout, group_rates
from engines.vllm_plugin.device.layouts.raw_layout import RawStagingLayout
from engines.vllm_plugin.device.layouts.row_segment import RowSegmentLayout
from engines.vllm_plugin.device.layouts.staging_layout import StagingLayout
from kvstore.blobs.packer import Packer
from kvstore.blobs.segments import squeezes
from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.fixed_rate.rate_payload import plan_rates
from kvstore.codecs.fixed_rate.rate_pipeline import rate_pipelines
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.store.records import Span


class StagingLayouts:
    """Makes the staging layouts of blobs, one for each length of first chunks and of others."""

    def __init__(self, groups: Sequence[KVViewGroup], packer: Packer, dtype: torch.dtype) -> None:
        self._groups = groups
        self._packer = packer
        self._codec = packer.codec  # kept here, since the store may adopt another codec
        self._kernels = kernels_for(groups, packer, dtype)
        self._pipelines = rate_pipelines(self._codec, packer.layout)
        self._rates = group_rates(groups, self._pipelines, dtype)
        self._raw = lru_cache(maxsize=None)(self._new_raw)
        self._packed = lru_cache(maxsize=None)(self._new_packed)
        self._first = lru_cache(maxsize=None)(self._new_first)

    def of(self, span: Span) -> StagingLayout:
        """Return the layout of a blob; the same object for blobs of one length and position."""
        tokens, first = span.num_tokens, span.first_token
        if span.is_tail or (self._kernels is None and self._rates is None):
            return self._raw(tokens)
        if first >= NUM_SINKS:
            return self._packed(tokens)
        has_head = not first and tokens > NUM_SINKS and squeezes(self._packer.layout, first)
        return self._first(tokens) if has_head else self._raw(tokens)

    def _new_raw(self, num_tokens: int) -> RawStagingLayout:
        return RawStagingLayout(self._groups, self._packer, num_tokens)

    def _new_packed(self, num_tokens: int) -> StagingLayout:
        segment = self._segment(num_tokens, skipped=0)
        return PackedLayout(segment, self._packer, self._codec, num_tokens)

    def _new_first(self, num_tokens: int) -> StagingLayout:
        head = self._new_raw(NUM_SINKS)
        segment = self._segment(num_tokens - NUM_SINKS, skipped=NUM_SINKS)
        return FirstChunkLayout(head, segment, self._packer, self._codec, num_tokens)

    def _segment(self, num_tokens: int, skipped: int) -> SegmentLayout:
        layout = self._packer.layout
        if self._rates is not None:
            rates = plan_rates(self._pipelines, layout, num_tokens, NUM_SINKS)
            return RateSegmentLayout(self._rates, layout, rates, skipped)
        codec = self._codec
        assert isinstance(codec, RowCodec)
        assert self._kernels is not None
        rows = plan_payload(codec.rows, layout, num_tokens, NUM_SINKS)
        return RowSegmentLayout(self._groups, self._kernels, codec, rows, skipped)


def kernels_for(
    groups: Sequence[KVViewGroup], packer: Packer, dtype: torch.dtype
) -> list[TritonRows] | None:
    """Return row kernels for each group; None if the codec has no kernels for these rows."""
    codec = packer.codec
    if not isinstance(codec, RowCodec) or not isinstance(codec.rows, RotatedRows):
        return None
    if not all(TritonRows.supports(codec.rows, x.dim, dtype) for x in groups):
        return None
    return [TritonRows(codec.rows, x.dim, dtype, x.starts.device) for x in groups]
