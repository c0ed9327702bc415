"""The tiers of a simulated fleet: they keep lengths instead of blobs; one is reached by a link."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from kvstore.blobs.chain import RECORD
from kvstore.session import TierName
from kvstore.tenant_bytes import TenantLimits
from kvstore.tiers.base import Blob
from kvstore.tiers.indexed_tier import IndexedTier
from kvstore.tiers.lru import IndexUpdate, RecencyIndex

ENTRY_BYTES: Final = 512  # of a blob besides its own bytes, as in the real tiers
WINDOW_S: Final = 10.0


class SizedBlob(bytes):
    """Bytes of which only the number is known."""

    def __new__(cls, nbytes: int) -> SizedBlob:
        return super().__new__(cls)

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes


@lru_cache(maxsize=4096)
def sized(nbytes: int) -> SizedBlob:
    """Return a blob of so many bytes; most blobs have one of a few sizes."""
    return SizedBlob(nbytes)


class SizedTier(IndexedTier):
    """Implements ``kvstore.tiers.base.Tier`` with the eviction of real tiers; records are kept.

    Args:
        capacity_bytes: of all blobs, with the overhead of a real tier for each.
        monotonic: the clock of the simulation.
    """

    overhead_bytes = ENTRY_BYTES

    def __init__(self, name: TierName, capacity_bytes: int, monotonic: Callable[[], float]) -> None:
        self.name = name
        self.persistent = name != "ram"
        self._index = RecencyIndex(capacity_bytes, monotonic=monotonic)
        self._lock = threading.Lock()  # of ``IndexedTier``; there is one thread
        self._records: dict[bytes, Blob] = {}
        self._num_evictions = 0

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        return [self._get(key) for key in keys]

    def _get(self, key: bytes) -> Blob | None:
        if (record := self._records.get(key)) is not None:
            return record
        entry = self._index.entry(key)
        return None if entry is None else sized(entry.nbytes - len(key) - ENTRY_BYTES)

    def put_many(self, items: Sequence[tuple[bytes, Blob]], owner: str = "") -> int:
        blobs = dict(items)
        sizes = {key: len(key) + len(x) + ENTRY_BYTES for key, x in items}
        self._follow(self._index.add(sizes, owner), blobs)
        return sum(map(self._index.__contains__, blobs))

    def replace(self, key: bytes, blob: Blob, owner: str = "", instead_of: bytes = b"") -> bool:
        before = instead_of or key
        old = self._index.remove(before)
        update = self._index.add({key: _size(key, blob)}, owner)
        if not update.added:
            if old is not None:
                update.evicted.append((before, old))
            self._index.undo(update)
            return False
        self._records.pop(before, None)
        self._follow(update, {key: blob})
        return True

    def _follow(self, update: IndexUpdate, blobs: dict[bytes, Blob]) -> None:
        for key, _ in update.evicted:
            if key[:1] == RECORD:
                del self._records[key]
        self._num_evictions += len(update.evicted)
        for key in update.added:
            if key[:1] == RECORD:
                self._records[key] = blobs[key]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._index for key in keys]

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        found = self.get_many(keys)
        return [None if blob is None else len(blob) for blob in found]

    def delete_many(self, keys: Iterable[bytes]) -> int:
        present = [key for key in keys if self._index.remove(key) is not None]
        for key in present:
            self._records.pop(key, None)
        return len(present)

    def drop_quarantine(self) -> None:
        """Do nothing: nothing here is ever damaged."""

    def _apply_limits(self, limits: TenantLimits) -> None:
        self._follow(IndexUpdate([], self._index.limit(limits)), {})

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        yield from sorted(x for x in self._records.items() if x[0].startswith(prefix))

    def flush(self) -> None:
        """Do nothing: all is written at once."""

    def close(self) -> None:
        self._records.clear()
        self._index = self._index.emptied()


def _size(key: bytes, blob: Blob) -> int:
    return len(key) + len(blob) + ENTRY_BYTES


class Link:
    """Carries so many bytes a second, first come, first served.

    Args:
        bytes_s: in both directions together; 0: there is none.
    """

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._free_at = 0.0
        self.read_bytes: Counter[int] = Counter()  # by the number of the window
        self.written_bytes: Counter[int] = Counter()

    def done_at(self, now_s: float, nbytes: int) -> float:
        """Say when so many bytes would have come through."""
        return max(now_s, self._free_at) + nbytes / self._bytes_s

    def read(self, now_s: float, nbytes: int) -> None:
        """Carry what a restore reads."""
        self._free_at = self.done_at(now_s, nbytes)
        self.read_bytes[int(now_s / WINDOW_S)] += nbytes

    def write(self, now_s: float, nbytes: int) -> None:
        """Carry what a turn's end writes."""
        if nbytes:
            self._free_at = self.done_at(now_s, nbytes)
            self.written_bytes[int(now_s / WINDOW_S)] += nbytes
