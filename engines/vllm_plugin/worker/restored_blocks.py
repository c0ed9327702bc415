"""Remembers which rows of vLLM's blocks were restored from a lossy copy.

A restored block lies in vLLM's prefix cache under the hash of the block that was computed, and a
later save cannot distinguish them. Packed a second time, its error would grow with each sleep. So
the hash of every block that came from a lossy copy is remembered here. vLLM gives a block to
another request without telling: it then has another hash, and the entry counts no more. A block
that began with the part of one has no hash yet: it goes by the hash of the block before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

NONE_BEFORE = b""  # stands for the hash of the block before a session's first


class RestoredBlocks:
    """The rows of each block that came from a lossy copy, by block id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[int, bytes] = {}  # of blocks that were restored as a whole
        # Of those that began with restored rows: the hash of the block before, and their number.
        self._parts: dict[int, tuple[bytes, int]] = {}

    def note(self, block_ids: Sequence[int], hashes: Sequence[bytes], *, lossy: bool) -> None:
        """Note that these blocks were just filled from a blob of a lossy codec, or of another."""
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
        self,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        before: bytes,
        block_tokens: int,
    ) -> int:
        """Count the tokens up to the last one of these blocks that came from a lossy copy.

        Args:
            hashes: of the full ones among the blocks; one that is not full may follow.
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
