"""Which blobs are kept from eviction because their session is pinned.

Pins of everybody together take at most a share of the smallest tier: what is pinned cannot give
way, and without a bound one tenant could leave the others no room. A pin beyond it is refused; a
pinned session that *grows* beyond it keeps what was pinned of it, and the rest can be evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import PinLimit
from kvstore.tier_stack import TierStack


class Pinned(NamedTuple):
    keys: Sequence[bytes]
    nbytes: int


_NOTHING = Pinned((), 0)


class Pins:
    """Follows pinned sessions as they grow. Thread-safe."""

    def __init__(self, stack: TierStack, share: float) -> None:
        self._stack = stack
        self._max_bytes = int(share * min((x.capacity_bytes for x in stack.stats()), default=0))
        self._lock = threading.Lock()
        self._pinned: dict[bytes, Pinned] = {}  # by record key
        self._nbytes = 0

    def check(self, record_key: bytes, nbytes: int) -> None:
        """Raises ``PinLimit``: a session of ``nbytes`` cannot be pinned beside the others."""
        with self._lock:
            others = self._nbytes - self._pinned.get(record_key, _NOTHING).nbytes
        if others + nbytes > self._max_bytes:
            raise PinLimit(
                f"pinned sessions may take {self._max_bytes} bytes and take {others}; this one"
                f" has {nbytes}: unpin another, or raise store.pinned_share"
            )

    def follow(self, record_key: bytes, keys: Sequence[bytes], nbytes: int) -> None:
        """Pin ``keys``, of ``nbytes``, in place of what was pinned of this session."""
        with self._lock:
            before = self._pinned.pop(record_key, _NOTHING)
            self._nbytes -= before.nbytes
            now = Pinned(keys, nbytes)
            if self._nbytes + nbytes > self._max_bytes:
                old = set(before.keys)
                now = Pinned([x for x in keys if x in old], before.nbytes)
            if now.keys:
                self._pinned[record_key] = now
                self._nbytes += now.nbytes
            # Pins are counted: the new ones first, so that nothing is loose in between.
            self._stack.pin(now.keys)
            self._stack.unpin(before.keys)

    def release(self, record_key: bytes) -> None:
        with self._lock:
            before = self._pinned.pop(record_key, _NOTHING)
            self._nbytes -= before.nbytes
            self._stack.unpin(before.keys)
