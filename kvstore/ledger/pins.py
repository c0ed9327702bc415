"""Lets blobs of pinned sessions go last: tiers evict them only when nothing else is left.

No share bounds them: a tenant's limit of bytes counts pinned blobs as all others, and beyond it, or
in a tier that pinned sessions fill alone, the longest unused one loses its end first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.ledger.stack import TierStack


class Pins:
    """Follows pinned sessions as they grow. Thread-safe."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._lock = threading.Lock()
        self._held: dict[bytes, Sequence[bytes]] = {}  # by record key

    @property
    def pinned(self) -> dict[bytes, Sequence[bytes]]:
        """Keys of the blobs that are pinned, by the record key of their session."""
        with self._lock:
            return dict(self._held)

    def follow(self, record_key: bytes, keys: Sequence[bytes]) -> None:
        """Pin the session's present blobs in place of those pinned before."""
        with self._lock:
            before = self._held.get(record_key, ())
            # Pins are counted. The new ones come first, so that no blob is unpinned in between.
            self._stack.pin(keys)
            self._held[record_key] = keys
            self._stack.unpin(before)

    def release(self, record_key: bytes) -> None:
        with self._lock:
            self._stack.unpin(self._held.pop(record_key, ()))
