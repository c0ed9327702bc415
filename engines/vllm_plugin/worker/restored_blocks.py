"""Remembers which of vLLM's blocks were restored from a lossy copy.

A restored block lies in vLLM's prefix cache under the hash of the block that was computed, and a
later save cannot tell them apart. Packed a second time, its error would grow with each sleep. So
the hash of every block that came from a lossy copy is remembered here. vLLM gives a block to
another request without telling: it then has another hash, and the entry counts no more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class RestoredBlocks:
    """The hash of each lossily restored block, by block id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[int, bytes] = {}  # by block id

    def note(self, block_ids: Sequence[int], hashes: Sequence[bytes], *, lossy: bool) -> None:
        """Note that these blocks were just filled from a blob of a lossy codec, or of another."""
        with self._lock:
            for block_id, name in zip(block_ids, hashes, strict=True):
                if lossy:
                    self._hashes[block_id] = name
                else:
                    self._hashes.pop(block_id, None)

    def any_of(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """True if some of these blocks came from a lossy copy."""
        with self._lock:
            pairs = zip(block_ids, hashes, strict=True)
            return any(self._hashes.get(block_id) == name for block_id, name in pairs)
