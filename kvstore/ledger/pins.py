"""Lets blobs of pinned sessions go last: tiers evict them only when nothing else is left.

No share bounds them: a tenant's limit of bytes counts pinned blobs as all others, and beyond it, or
in a tier that pinned sessions fill alone, the longest unused one loses its end first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.ledger.stack import PinnedNames, TierStack


class _Held(NamedTuple):
    keys: Sequence[bytes]
    names: PinnedNames


class Pins:
    """Follows pinned sessions as they grow. Thread-safe."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}  # by record key

    @property
    def pinned(self) -> dict[bytes, Sequence[bytes]]:
        """Keys of the blobs that are pinned, by the record key of their session."""
        with self._lock:
            return {record_key: x.keys for record_key, x in self._held.items()}

    def follow(self, record_key: bytes, keys: Sequence[bytes]) -> None:
        """Pin the session's present blobs in place of those pinned before."""
        with self._lock:
            before = self._held.pop(record_key, None)
            # Pins are counted. The new ones come first, so that no blob is unpinned in between.
            self._held[record_key] = _Held(keys, self._stack.pin(keys))
            self._loosen(before)

    def release(self, record_key: bytes) -> None:
        with self._lock:
            self._loosen(self._held.pop(record_key, None))

    def renew(self) -> None:
        """Pin all pinned blobs again, since their names may have changed."""
        with self._lock:
            for key, held in self._held.items():
                self._held[key] = held._replace(names=self._stack.pin(held.keys))
                self._loosen(held)

    def _loosen(self, held: _Held | None) -> None:
        if held is not None:
            self._stack.unpin(held.names)
