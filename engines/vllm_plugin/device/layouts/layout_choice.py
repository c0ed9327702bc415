"""Chooses the staging layout of a blob: packed if the codec has kernels, else raw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from engines.vllm_plugin.device.kernels.triton_rows import TritonRows
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.layouts.rate_layout import RateStagingLayout, group_rates
from engines.vllm_plugin.device.layouts.raw_layout import RawStagingLayout
from engines.vllm_plugin.device.layouts.row_layout import RowStagingLayout
from engines.vllm_plugin.device.layouts.staging_layout import StagingLayout
from kvstore.blobs.packer import Packer
from kvstore.by_blocks.names import BlobSpan
from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.fixed_rate.rate_payload import plan_rates
from kvstore.codecs.fixed_rate.rate_pipeline import rate_pipelines
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec


class StagingLayouts:
    """Makes the staging layouts of blobs, one for each length and number of sink tokens."""

    def __init__(
        self, groups: Sequence[KVViewGroup], packer: Packer, block_tokens: int, dtype: torch.dtype
    ) -> None:
        self._groups = groups
        self._packer = packer
        self._codec = packer.codec  # kept here, since the store may adopt another codec
        self._block_tokens = block_tokens
        self._kernels = kernels_for(groups, packer, dtype)
        self._pipelines = rate_pipelines(self._codec, packer.layout)
        self._rates = group_rates(groups, self._pipelines, dtype)
        self._raw = lru_cache(maxsize=None)(self._new_raw)
        self._packed = lru_cache(maxsize=None)(self._new_packed)

    def of(self, span: BlobSpan) -> StagingLayout:
        """Return the layout of a blob; the same object for blobs of one length and position."""
        tokens = span.num_blocks * self._block_tokens
        if span.is_tail or (self._kernels is None and self._rates is None):
            return self._raw(tokens)
        return self._packed(tokens, min(span.first_block * self._block_tokens, NUM_SINKS))

    def _new_raw(self, num_tokens: int) -> StagingLayout:
        return RawStagingLayout(self._groups, self._packer, num_tokens)

    def _new_packed(self, num_tokens: int, first_token: int) -> StagingLayout:
        if self._rates is not None:
            payload = plan_rates(self._pipelines, self._packer.layout, num_tokens, first_token)
            return RateStagingLayout(self._rates, self._packer, self._codec, payload)
        codec = self._codec
        assert isinstance(codec, RowCodec)
        assert self._kernels is not None
        plan = plan_payload(codec.rows, self._packer.layout, num_tokens, first_token)
        return RowStagingLayout(self._groups, self._kernels, self._packer, codec, plan)


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
