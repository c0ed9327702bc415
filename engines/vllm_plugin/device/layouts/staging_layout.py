"""The protocol of a layout of staging memory between blocks and blob.

The codec's own kernels write a region with a *packed* layout, which holds the payload. For every
other blob (codec ``raw``, tails, a codec or dtype or head dimension without kernels) the device
only gathers and scatters rows, and the store's packer works on the region as if it were the
engine's arrays. Either way the blob has the same bytes as one that ``host_blocks`` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.layouts.kept_rows import KeptRows
from kvstore.blobs.packer import AnyBlob
from kvstore.store.records import Span
from kvstore.tiers.base import Blob


@dataclass(frozen=True, eq=False)
class TokenRun:
    """The tokens of one blob among those of a save or load.

    Attributes:
        blocks: the ids of the blocks of all these tokens, int64 (num_blocks,) on the device.
        first: the index among these tokens of the blob's first token.
        position: the position of that token in its session.
    """

    blocks: Tensor
    first: int
    position: int


class StagingLayout(Protocol):
    """The layout of all blobs of one length and position; thread-safe, without state.

    An array ``staged`` is the part of a region for one blob, uint8 (nbytes,). A tensor ``staged``
    has one row for each of some blobs that follow each other, uint8 (num_blobs, nbytes).
    """

    @property
    def nbytes(self) -> int:
        """The size of a blob's part of a region."""

    @property
    def takes_many(self) -> bool:
        """True if one call of ``read`` or ``write`` may handle several blobs."""

    def read(self, run: TokenRun, staged: Tensor) -> None:
        """Queue the work that fills the rows from the blocks; ``run`` is that of the first blob."""

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        """Return the rows that the device could not pack; called before the blocks are reused."""

    def seal(self, span: Span, staged: np.ndarray, rescued: bytes) -> Blob:
        """Make a blob from its part of a region and the rescued rows. On any thread."""

    def open(self, blob: AnyBlob, span: Span, staged: np.ndarray) -> list[KeptRows]:
        """Fill the part from a blob; return the rows that it cannot hold. On any thread.

        Raises:
            Unusable: the blob is damaged, or is not the one that ``span`` names.
        """

    def write(self, run: TokenRun, staged: Tensor) -> None:
        """Queue the work that fills the blocks; blocks with an id below zero are skipped."""

    def write_kept(self, run: TokenRun, kept: list[KeptRows]) -> None:
        """Queue the writes of the rows of one blob that its part cannot hold."""


def device_table(numbers: npt.ArrayLike, group: KVViewGroup) -> Tensor:
    """Copy numbers to the device of a group, as int64 of the same shape."""
    return torch.from_numpy(np.array(numbers, np.int64)).to(group.starts.device)
