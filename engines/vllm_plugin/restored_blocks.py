"""Which of vLLM's blocks hold KV that a lossy codec has been at.

A restored block lies in vLLM's prefix cache under the hash of the exact one, and a later save would
take it for that. Packed a second time, its error would grow with each sleep; so it is remembered
here which block came from a lossy copy, and of which hash. vLLM gives a block to somebody else
without a word: then the hash is another one, and what is known of the block counts no more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class RestoredBlocks:
    """Thread-safe. At most one entry for each of vLLM's blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[int, bytes] = {}  # by block id

    def note(self, block_ids: Sequence[int], hashes: Sequence[bytes], *, lossy: bool) -> None:
        """These blocks were just filled out of a blob."""
        with self._lock:
            for block_id, name in zip(block_ids, hashes, strict=True):
                if lossy:
                    self._hashes[block_id] = name
                else:
                    self._hashes.pop(block_id, None)

    def any_of(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Some of these are not as they were computed."""
        with self._lock:
            pairs = zip(block_ids, hashes, strict=True)
            return any(self._hashes.get(block_id) == name for block_id, name in pairs)
