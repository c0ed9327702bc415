"""The interface between a rank's transfers and the code that packs and fills vLLM's blocks.

vLLM's prefix cache holds a restored block under the hash of the originally computed block, so a
later save cannot distinguish the two by hash. If restored blocks were packed a second time, their
error would grow with each sleep. So ``RestoredBlocks`` remembers the hash of every block that was
filled from a lossy copy. vLLM gives a block to another request without notice: the block then has
another hash, and its entry no longer matches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvstore.blobs.chain import Piece
from kvstore.blobs.packer import AnyBlob
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class Packing:
    """A chunk to be packed from these blocks."""

    piece: Piece
    block_ids: list[int]


@dataclass(frozen=True)
class Filling:
    """Blocks to be filled from a chunk's blob, beginning with the chunk's block number ``skip``."""

    piece: Piece
    blob: AnyBlob
    skip: int
    block_ids: list[int]


class Stream(Protocol):
    """Runs work in order, in parallel to the model's stream, which never waits for it."""

    def mark(self) -> object:
        """Return a mark of the work queued so far on the current stream; on the model's thread."""

    def enqueue_after(self, mark: object) -> AbstractContextManager[None]:
        """Run the work that is queued inside the ``with`` block after the work before ``mark``."""

    def after(self, mark: object) -> AbstractContextManager[None]:
        """Enqueue like ``enqueue_after``, and wait at the end of the ``with`` block."""

    def ask(self, work: Callable[[], None]) -> None:
        """Queue the launches and copies that ``work`` makes; call it inside ``enqueue_after``."""

    def completion(self) -> Callable[[], None]:
        """Return a function that waits until all work queued so far on this stream is done."""

    def drain(self) -> None:
        """Wait until this stream has no work left."""


class Blocks(Protocol):
    """Packs vLLM's blocks into blobs and fills them again (``host_blocks``, ``device_blocks``)."""

    @property
    def block_bytes(self) -> int:
        """The bytes of one of vLLM's blocks, over all layers."""

    @property
    def why_host(self) -> str:
        """The reason why the host packs a cache in device memory; "" if it does not have to."""

    def mark(self) -> object:
        """Return a mark of the model's work queued so far; called on the model's thread."""

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[Blob]]:
        """Read the blocks, and return futures of their blobs, in the order of ``wanted``.

        The blocks are read once the device has reached the mark ``ready``, and may be reused when
        this returns.
        """

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks once the device has reached ``ready``; return the ids of those filled.

        The filled blocks can be used immediately.
        """

    def close(self) -> None:
        """Release memory and streams; no other call may follow."""


class RestoredBlocks:
    """The blocks that were filled from a lossy copy. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[int, bytes] = {}

    def note(self, block_ids: Sequence[int], hashes: Sequence[bytes], *, lossy: bool) -> None:
        """Note that these blocks were just filled from a blob; ``lossy``: its codec is lossy."""
        with self._lock:
            for block_id, name in zip(block_ids, hashes, strict=True):
                self._hashes.pop(block_id, None)
                if lossy:
                    self._hashes[block_id] = name

    def has_any(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Return whether any of these blocks, with these present hashes, came from a lossy copy."""
        with self._lock:
            pairs = zip(block_ids, hashes, strict=True)
            return any(self._hashes.get(block_id) == name for block_id, name in pairs)
