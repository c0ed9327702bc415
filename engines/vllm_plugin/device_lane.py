"""What pieces need on their way between blocks and blobs: a ring, a stream, the codec's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.vllm_plugin.device_forms import Form
from engines.vllm_plugin.device_staging import Region, Staging
from engines.vllm_plugin.streams import SideStream
from kvstore.block_keys import Piece
from kvstore.block_store import BlockStore


@dataclass(frozen=True, eq=False)
class Lane:
    """One direction. A save must not wait behind a restore, nor the other way round.

    ``launching``: shared by all lanes; Triton's interpreter, which tests use, runs one kernel at a
    time, and its launcher on a GPU takes microseconds.
    """

    store: BlockStore
    form_of: Callable[[Piece], Form]
    ring: Staging
    stream: SideStream
    device: torch.device
    launching: threading.Lock

    def first_token(self, piece: Piece) -> int:
        return piece.first_block * self.store.keys.block_tokens

    def table(self, block_ids: list[int]) -> Tensor:
        """On the device: one small copy for a whole save or load, which nobody waits for."""
        table = torch.tensor(block_ids, dtype=torch.int64)
        if self.device.type != "cuda":
            return table
        return table.pin_memory().to(self.device, non_blocking=True)


@dataclass(eq=False)
class Flight:
    """A piece under way.

    Attributes:
        first: its first token in the run of all pieces of its save or load.
        block_ids: those that it is about, of vLLM's.
        landed: waits until the device is done with it.
    """

    form: Form
    region: Region
    piece: Piece
    first: int
    block_ids: list[int]
    landed: Callable[[], None] | None = None
