"""The seam between the transfers of a rank and what packs and fills vLLM's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvstore.blobs.packer import AnyBlob
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.by_blocks.names import BlobSpan
from kvstore.codecs.base import Codec
from kvstore.shapes import KVPair


@dataclass(frozen=True)
class Packing:
    """A blob to be packed out of these blocks; a part takes the first rows of one block."""

    span: BlobSpan
    block_ids: list[int]
    lineage: Lineage = FRESH  # of rows, as ``Packer.pack_run`` takes it
    hashes: Sequence[bytes] = ()  # of a state: those of the session's blocks up to it


# What a slower tier's codec packs again: the rows of a blob, (num_kv_heads, num_tokens, head_dim)
# for K and V per layer, and for each state what packs it.
PackState: TypeAlias = Callable[[Codec], bytes]
Rows: TypeAlias = dict[BlobSpan, Sequence[KVPair] | PackState]


@dataclass(frozen=True)
class Filling:
    """Blocks to be filled from a blob, beginning with the blob's block number ``skip``.

    ``part_tokens``: for a part, the number of rows to fill; later rows stay as they are.
    """

    span: BlobSpan
    blob: AnyBlob
    skip: int
    block_ids: list[int]
    part_tokens: int = 0
    hashes: Sequence[bytes] = ()  # as of ``Packing``


class Blocks(Protocol):
    """Packs vLLM's blocks into blobs and fills them again (``host_blocks``, ``device_blocks``)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one of vLLM's blocks, over all layers."""

    def mark(self) -> object:
        """A mark after all work that the model has given to the device. On the model's thread."""

    def pack(
        self, wanted: Sequence[Packing], ready: object, rows: Rows | None = None
    ) -> list[Future[bytes]]:
        """Read the blocks, and return futures of their blobs, in the order of ``wanted``.

        The blocks are read once the device has come to the mark ``ready``, and are free again when
        this returns. ``rows``: takes what another codec packs, too.
        """

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks once the device has come to ``ready``; return the ids of the good ones.

        These blocks can be used at once.
        """

    def close(self) -> None:
        """Give back memory and streams; no call follows."""
