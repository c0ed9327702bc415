"""The interface between a rank's transfers and the code that packs and fills vLLM's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvstore.blobs.packer import AnyBlob
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.codecs.base import Codec
from kvstore.shapes import KVPair
from kvstore.store.records import Span
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class Packing:
    """A blob to be packed from these blocks; a part is packed from the first rows of one block."""

    span: Span
    block_ids: list[int]
    lineage: Lineage = FRESH  # of the rows, an argument of ``Packer.pack_run``
    hashes: Sequence[bytes] = ()  # for a state: those of the session's blocks up to it


# The input for the codec of a slower tier, which packs again: for a blob its rows, (num_kv_heads,
# num_tokens, head_dim) for K and V per layer, and for a state the function that packs it.
PackState: TypeAlias = Callable[[Codec], Blob]
Rows: TypeAlias = dict[Span, Sequence[KVPair] | PackState]


@dataclass(frozen=True)
class Filling:
    """Blocks to be filled from a blob, beginning with the blob's block number ``skip``.

    ``part_tokens``: for a part, the number of rows to fill; later rows do not change.
    """

    span: Span
    blob: AnyBlob
    skip: int
    block_ids: list[int]
    part_tokens: int = 0
    hashes: Sequence[bytes] = ()  # as in ``Packing``


class Blocks(Protocol):
    """Packs vLLM's blocks into blobs and fills them again (``host_blocks``, ``device_blocks``)."""

    @property
    def block_bytes(self) -> int:
        """The bytes of one of vLLM's blocks, over all layers."""

    @property
    def why_host(self) -> str:
        """The reason why the host packs what lies on a device, in words; "" if it need not."""

    def mark(self) -> object:
        """Make a mark after the model's work queued so far. Called on the model's thread."""

    def pack(
        self, wanted: Sequence[Packing], ready: object, rows: Rows | None = None
    ) -> list[Future[Blob]]:
        """Read the blocks, and return futures of their blobs, in the order of ``wanted``.

        The blocks are read once the device has reached the mark ``ready``, and may be reused when
        this returns. ``rows`` is filled with the input for another codec.
        """

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks once the device has reached ``ready``; return the ids of those filled.

        The filled blocks can be used immediately.
        """

    def close(self) -> None:
        """Release memory and streams; no other call may follow."""
