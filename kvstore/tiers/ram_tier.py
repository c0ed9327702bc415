"""The RAM tier: packed blobs in this process's own memory.

Every method takes a few dictionary operations per key under one lock. Blobs are copied before the
lock is taken, so a large copy never delays other threads. The memory of a forgotten blob is freed
but not overwritten, which Python offers no way to do.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic

from kvstore.session import TenantLimits, TierName
from kvstore.tiers.base import Blob, EvictionCause, TierStats
from kvstore.tiers.return_order import ReturnOrder
from kvstore.tiers.runs import V

# CPython's memory per blob besides the bytes of key and blob: object headers, an entry in each of
# two dictionaries, the allocator's rounding (about 160 bytes traced with 20,000 blobs).
ENTRY_BYTES = 256


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
        """Return the number of errors of the medium, and whether it answers."""
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
            return self._index.held(keys)

    @abstractmethod
    def _apply_limits(self, limits: TenantLimits) -> None:
        """Set the limits of tenants, and evict blobs beyond them. Takes the tier's locks itself."""

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        with self._lock:
            self._index.touch(keys, restored=restored)

    def pin(self, key: bytes, pinned: bool) -> None:
        with self._lock:
            self._index.pin(key, pinned)

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        with self._lock:
            return [self._index.causes.get(key) for key in keys]


class RamTier(IndexedTier[Blob]):
    """Implements ``base.Tier``; the ``ReturnOrder`` holds the blobs themselves.

    Args:
        capacity_bytes: keys, blobs and index entries together never exceed it.
    """

    name: TierName = "ram"

    def __init__(
        self, capacity_bytes: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._index = ReturnOrder(capacity_bytes, monotonic, _size_of)
        self._lock = threading.Lock()
        self._num_evictions = 0

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        with self._lock:
            return self._index.get(keys)

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        blobs = {key: _own(blob) for key, blob in items}
        with self._lock:
            self._count(self._index.add(blobs, owner, after).evicted)
            return sum(key in self._index for key in blobs)

    def replace(self, key: bytes, blob: Blob, owner: str = "", after: bytes = b"") -> bool:
        blob = _own(blob)
        with self._lock:
            update = self._index.replace(key, blob, owner, after)
            self._count(update.evicted)
            return bool(update.added)

    def _count(self, evicted: Sequence[bytes]) -> None:
        self._num_evictions += sum(key not in self._index for key in evicted)

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        return [None if blob is None else len(blob) for blob in self.get_many(keys)]

    def delete_many(self, keys: Iterable[bytes]) -> int:
        with self._lock:
            wanted = {key for key in keys if key in self._index}
            self._index.remove(wanted)
            return len(wanted)

    def _apply_limits(self, limits: TenantLimits) -> None:
        with self._lock:
            self._count(self._index.limit(limits))

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        with self._lock:
            keys = sorted(self._index.keys(prefix))
        pairs = zip(keys, self.get_many(keys), strict=True)
        yield from ((key, blob) for key, blob in pairs if blob is not None)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            self._index.remove(self._index.keys(b""))


def _own(blob: Blob) -> Blob:
    """Return a copy of a view, whose memory may be reused; any other blob as it is."""
    return bytes(blob) if isinstance(blob, memoryview) else blob


def _size_of(key: bytes, blob: Blob) -> int:
    return len(key) + len(blob) + ENTRY_BYTES
