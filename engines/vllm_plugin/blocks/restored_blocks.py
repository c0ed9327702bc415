"""Remembers which rows of vLLM's blocks were restored from a lossy copy.

vLLM's prefix cache has a restored block under the hash of the originally computed block, and a
later save cannot distinguish the two. If restored blocks were packed a second time, their error
would grow with each sleep. So this module remembers the hash of every block that was filled from a
lossy copy. vLLM gives a block to another request without notice: the block then has another hash,
and its entry no longer matches. A block that begins with a restored part has no hash yet: its entry
has the hash of the block before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

NONE_BEFORE = b""  # in place of the hash of the block before a session's first block


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
        self,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        before: bytes,
        block_tokens: int,
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
