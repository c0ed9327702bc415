"""The interface between a rank's transfers and the code that packs and fills vLLM's blocks.

vLLM's prefix cache has a restored block under the hash of the originally computed block, and a
later save cannot distinguish the two. If restored blocks were packed a second time, their error
would grow with each sleep. So ``RestoredBlocks`` remembers the hash of every block that was filled
from a lossy copy. vLLM gives a block to another request without notice: the block then has another
hash, and its entry no longer matches. A block that begins with a restored part has no hash yet: its
entry has the hash of the block before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvstore.blobs.packer import AnyBlob
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.codecs.base import Codec
from kvstore.shapes import KVPair
from kvstore.store.spans import Span
from kvstore.tiers.base import Blob

# The input for the codec of a slower tier, which packs again: for a blob its rows, (num_kv_heads,
# num_tokens, head_dim) for K and V per layer, and for a state the function that packs it.
PackState: TypeAlias = Callable[[Codec], Blob]
Rows: TypeAlias = dict[Span, Sequence[KVPair] | PackState]
NONE_BEFORE = b""  # in place of the hash of the block before a session's first block


@dataclass(frozen=True)
class Packing:
    """A blob to be packed from these blocks; a part is packed from the first rows of one block."""

    span: Span
    block_ids: list[int]
    lineage: Lineage = FRESH  # of the rows, an argument of ``Packer.pack_run``
    hashes: Sequence[bytes] = ()  # for a state: those of the session's blocks up to it


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


class RestoredBlocks:
    """The rows of each block that came from a lossy copy, by block id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[int, bytes] = {}  # of blocks that were restored completely
        # For blocks that begin with restored rows: the hash of the block before, and the number of
        # these rows.
        self._parts: dict[int, tuple[bytes, int]] = {}

    def note(self, block_ids: Sequence[int], hashes: Sequence[bytes], *, lossy: bool) -> None:
        """Note that these blocks were just filled from a blob; ``lossy``: its codec is lossy."""
        with self._lock:
            for block_id, name in zip(block_ids, hashes, strict=True):
                self._forget(block_id)
                if lossy:
                    self._hashes[block_id] = name

    def note_part(self, block_id: int, before: bytes, num_tokens: int, *, lossy: bool) -> None:
        """Note that the first rows of this block, which follows ``before``, were just filled."""
        with self._lock:
            self._forget(block_id)
            if lossy:
                self._parts[block_id] = before, num_tokens

    def _forget(self, block_id: int) -> None:
        self._hashes.pop(block_id, None)
        self._parts.pop(block_id, None)

    def num_lossy(
        self, block_ids: Sequence[int], hashes: Sequence[bytes], before: bytes, block_tokens: int
    ) -> int:
        """Count the tokens up to the last one of these blocks that came from a lossy copy.

        Args:
            hashes: those of the full blocks; one block that is not full may follow.
            before: the hash of the block before them.
        """
        names = [*hashes, None][: len(block_ids)]
        with self._lock:
            for i in range(len(block_ids) - 1, -1, -1):
                block_id, name = block_ids[i], names[i]
                if name is not None and self._hashes.get(block_id) == name:
                    return (i + 1) * block_tokens
                at, num_tokens = self._parts.get(block_id, (None, 0))
                if at == (hashes[i - 1] if i else before):
                    return i * block_tokens + num_tokens
        return 0
