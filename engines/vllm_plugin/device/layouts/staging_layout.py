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
from kvstore.by_blocks.names import BlobSpan


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

    In every call ``staged`` is the region, uint8 (nbytes,). ``first_token`` counts from the
    session's beginning.
    """

    @property
    def nbytes(self) -> int:
        """The size of a region."""

    def read(self, run: TokenRun, staged: Tensor) -> None:
        """Queue the work that fills the region from the blocks."""

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        """Return the rows that the device could not pack; called before the blocks are reused."""

    def seal(self, span: BlobSpan, first_token: int, staged: np.ndarray, rescued: bytes) -> bytes:
        """Make a blob from a region and the rescued rows. On any thread."""

    def open(
        self, blob: AnyBlob, span: BlobSpan, first_token: int, staged: np.ndarray
    ) -> list[KeptRows]:
        """Fill the region from a blob; return the rows that the region cannot hold. On any thread.

        Raises:
            Unusable: the blob is damaged, or is not the one that ``span`` names.
        """

    def write(self, run: TokenRun, staged: Tensor, kept: list[KeptRows]) -> None:
        """Queue the work that fills the blocks; blocks with an id below zero are skipped."""


def device_table(numbers: npt.ArrayLike, group: KVViewGroup) -> Tensor:
    """Copy numbers to the device of a group, as int64 of the same shape."""
    return torch.from_numpy(np.array(numbers, np.int64)).to(group.starts.device)
