"""Which blobs are kept from eviction because their session is pinned."""

from __future__ import annotations

import threading

from kvstore.records import SessionRecord
from kvstore.session_keys import KeyMaker
from kvstore.tier_stack import TierStack


class Pins:
    """Follows pinned sessions as they grow. Thread-safe."""

    def __init__(self, stack: TierStack, keys: KeyMaker) -> None:
        self._stack = stack
        self._keys = keys
        self._lock = threading.Lock()
        self._pinned: dict[bytes, list[bytes]] = {}

    def follow(self, record: SessionRecord) -> None:
        """Pin what the record names, if it says so; let go of what an older one named."""
        key = self._keys.record_key(record)
        now = [key, *self._keys.listed(record)] if record.pinned else []
        with self._lock:
            before = self._pinned.pop(key, [])
            if now:
                self._pinned[key] = now
            # Pins are counted: the new ones first, so that nothing is loose in between.
            self._stack.pin(now)
            self._stack.unpin(before)

    def release(self, record_key: bytes) -> None:
        with self._lock:
            self._stack.unpin(self._pinned.pop(record_key, []))
