"""One direction of copying between blocks and blobs: a side stream and a ring of staging memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.vllm_plugin.device.accelerator import Stream, sent
from engines.vllm_plugin.device.layouts.staging_layout import StagingLayout, TokenRun
from engines.vllm_plugin.device.staging import Region, StagingRing
from kvstore.by_blocks.names import BlobSpan
from kvstore.by_blocks.store import BlockStore


@dataclass(frozen=True, eq=False)
class CopyStream:
    """The resources of one direction: a save must not wait for a restore, nor the reverse."""

    store: BlockStore
    layout_of: Callable[[BlobSpan], StagingLayout]
    ring: StagingRing
    side_stream: Stream
    device: torch.device

    def first_token(self, span: BlobSpan) -> int:
        """Return the position in its session of the first token of ``span``."""
        return span.first_block * self.store.keys.block_tokens

    def table(self, block_ids: list[int]) -> Tensor:
        """Return block ids as int64 (num_blocks,) on the device.

        On CUDA that is one small copy for a whole save or load; no thread waits for it.
        """
        return sent(torch.tensor(block_ids, dtype=torch.int64), self.device)

    def run_of(self, copy: InFlight, blocks: Tensor) -> TokenRun:
        """Return the tokens of a blob; ``blocks`` is the ``table`` of its save or load."""
        return TokenRun(blocks, copy.first, self.first_token(copy.span))


@dataclass(eq=False)
class InFlight:
    """A copy under way of one blob's rows between blocks and staging memory.

    Attributes:
        first: the index of its first token in the run of all tokens of its save or load.
        block_ids: vLLM's ids of the blocks that it reads or writes.
        wait_done: returns when the device has finished the copy; None before the copy is queued.
    """

    layout: StagingLayout
    region: Region
    span: BlobSpan
    first: int
    block_ids: list[int]
    wait_done: Callable[[], None] | None = None
