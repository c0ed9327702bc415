"""The methods that every local tier implements with its order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Generic

from kvstore.config import TenantLimits
from kvstore.session import TierName
from kvstore.tiers.base import EvictionCause, TierStats
from kvstore.tiers.return_order import ReturnOrder
from kvstore.tiers.runs import V


class IndexedTier(ABC, Generic[V]):
    """The methods of ``Tier`` that a ``ReturnOrder`` implements, under the lock of the tier."""

    name: TierName
    _index: ReturnOrder[V]
    _lock: threading.Lock
    _num_evictions: int

    def stats(self) -> TierStats:
        with self._lock:
            num_errors, is_available = self._health()
            return TierStats(
                name=self.name,
                nbytes=self._index.nbytes,
                capacity_bytes=self._index.capacity_bytes,
                num_blobs=len(self._index),
                evictions=self._num_evictions,
                errors=num_errors,
                available=is_available,
            )

    def _health(self) -> tuple[int, bool]:
        """Count errors of the medium, and say whether it answers."""
        return 0, True

    @property
    def owed_file(self) -> Path | None:
        return None

    def own(self, owner: str, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._index.own(owner, keys)

    def limit_tenants(self, limits: TenantLimits) -> dict[str, int] | None:
        self._apply_limits(limits)
        with self._lock:
            return self._index.uses(limits)

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    @abstractmethod
    def _apply_limits(self, limits: TenantLimits) -> None:
        """Set the limits, and remove blobs that are beyond them. Takes the locks of a writer."""

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        with self._lock:
            self._index.touch(keys, restored=restored)

    def pin(self, key: bytes, pinned: bool) -> None:
        with self._lock:
            self._index.pin(key, pinned)

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        with self._lock:
            return [self._index.causes.get(key) for key in keys]
