"""One direction of copying between blocks and blobs: a side stream and a ring of staging memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engines.vllm_plugin.blocks.blocks import Stream
from engines.vllm_plugin.device.accelerator import Region, StagingRing, rounded_up, sent
from engines.vllm_plugin.device.staging_layout import StagingLayout, TokenRun
from kvstore.blobs.chain import Piece
from kvstore.store.cold_store import ColdStore

MOST_TOKENS: Final = 512  # in a batch; as many as in a page of ``payload_layouts.Angles``
MOST_BYTES: Final = 8 << 20  # of a batch


class OneBlob(Protocol):
    """Names a blob and the blocks that a save reads for it, or a load fills from it."""

    @property
    def piece(self) -> Piece: ...

    @property
    def block_ids(self) -> list[int]: ...


Wanted = TypeVar("Wanted", bound=OneBlob)


@dataclass(frozen=True, eq=False)
class CopyStream:
    """The stream and staging memory of one direction.

    Each direction has its own, so that saves and restores do not wait for each other.
    """

    store: ColdStore
    layout_of: Callable[[Piece], StagingLayout]
    ring: StagingRing
    side_stream: Stream
    device: torch.device

    def batches(self, wanted: Sequence[Wanted]) -> Iterator[Batch[Wanted]]:
        """Yield batches of chunks that follow each other; any other blob is a batch of its own.

        Launching kernels for a single chunk holds the interpreter's lock for as long as the device
        packs it. Batches begin at the same chunks in every session.
        """
        first = 0
        batch: Batch[Wanted] | None = None
        for x in wanted:
            layout = self.layout_of(x.piece)
            if batch is None or not self._continues(batch, layout, x.piece):
                if batch is not None:
                    yield batch
                    first += batch.num_tokens
                batch = Batch(layout, first)
            batch.blobs.append(x)
        if batch is not None:
            yield batch

    def _continues(self, batch: Batch[Wanted], layout: StagingLayout, piece: Piece) -> bool:
        if layout is not batch.layout or not layout.takes_many:
            return False
        most = min(
            MOST_TOKENS // piece.num_tokens,
            min(MOST_BYTES, self.ring.nbytes // 2) // rounded_up(layout.nbytes),
        )
        number = piece.first_token // piece.num_tokens
        follows = piece.first_token == batch.blobs[-1].piece.end_token
        return follows and bool(number % (1 << max(most, 1).bit_length() - 1))

    def table(self, block_ids: list[int]) -> Tensor:
        """Return block ids as int64 (num_blocks,) on the device.

        On CUDA that is one small copy for a whole save or load; no thread waits for it.
        """
        return sent(torch.tensor(block_ids, dtype=torch.int64), self.device)


@dataclass(eq=False)
class Batch(Generic[Wanted]):
    """Blobs of one layout that follow each other in a session.

    ``first``: the index of their first token among all tokens of their save or load.
    """

    layout: StagingLayout
    first: int
    blobs: list[Wanted] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(x.piece.num_tokens for x in self.blobs)

    def runs(self, blocks: Tensor) -> list[TokenRun]:
        """Return the tokens of each blob; ``blocks`` is the table of the whole save or load."""
        at, found = self.first, []
        for x in self.blobs:
            found.append(TokenRun(blocks, at, x.piece.first_token))
            at += x.piece.num_tokens
        return found


@dataclass(eq=False)
class InFlight(Generic[Wanted]):
    """An unfinished copy of a batch's rows between blocks and a region.

    ``wait_done``: returns when the device has finished the copy; None before the copy is queued.
    """

    batch: Batch[Wanted]
    region: Region
    wait_done: Callable[[], None] | None = None
