"""The Redis tier: blobs on a Redis or Valkey server that several engines may share.

**The server decides what is there.** It may evict any entry, restart empty or be gone:
``contains_many`` asks it, and a blob counts only if all of it comes back (``blobs``).

**Budget.** ``capacity_bytes`` bounds what *this object* wrote and has not deleted: an index in
memory that ends with it. What other or earlier processes left is bounded by the server's own
``maxmemory`` and policy (``allkeys-lru`` suits) and by ``ttl_s``. A server that is full and may not
evict refuses a blob; that is counted as an error, and the blob stays in the faster tiers. Pins keep
blobs from our own eviction only; the server knows nothing of them.

**Time.** Each exchange with the server has ``deadline_s``; ``get_many`` has it once for everything
and returns what came in time. After three failures in a row every call raises ``TierUnavailable``
at once, until a probe succeeds (``breaker``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Blob, TierStats
from kvstore.tiers.eviction_causes import EvictionCause
from kvstore.tiers.lru import IndexUpdate, RecencyIndex
from kvstore.tiers.redis_server.blobs import BATCH_KEYS, RedisBlobs
from kvstore.tiers.redis_server.fragments import BlobManifest, nbytes_on_server
from kvstore.tiers.redis_server.link import RedisLink


class RedisTier:
    """Implements ``base.Tier`` on the server at ``url``, which is connected to at the first use.

    Args:
        deadline_s: for one exchange with the server.
        ttl_s: entries expire this long after they were written or touched; 0 = never.
        guaranteed_share: of the budget, divided between active tenants: see ``tenant_parts``.

    Raises:
        ValueError: the URL is not one.
    """

    name = "redis"
    persistent = True

    def __init__(
        self,
        url: str,
        capacity_bytes: int,
        *,
        deadline_s: float,
        ttl_s: float = 0.0,
        guaranteed_share: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = RedisLink(url, deadline_s, monotonic)
        self._server = RedisBlobs(self._link, round(ttl_s * 1000))
        self._expires = ttl_s > 0
        self._writing = threading.Lock()  # one writer; always taken before the other lock
        self._lock = threading.Lock()  # the fields below; not held while the server is asked
        self._index = RecencyIndex(capacity_bytes, guaranteed_share, monotonic)
        self._manifests: dict[bytes, BlobManifest] = {}  # of written blobs of the index
        self._num_evictions = 0

    def __repr__(self) -> str:
        return f"RedisTier({self._link.name})"

    @property
    def overhead_bytes(self) -> int:
        return nbytes_on_server(1)

    def greet(self) -> None:
        """Ask the server for an answer, so that ``stats`` tells of it before the first blob."""
        with contextlib.suppress(TierUnavailable):  # the link has counted and logged it
            self._link.run([("PING",)])

    # Reading

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        blobs = self._server.read(keys)
        return [blobs.get(key) for key in keys]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._server.exist(keys)
        self._forget(key for key, there in zip(keys, found, strict=True) if not there)
        return found

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        keys = self._server.find(prefix)
        for first in range(0, len(keys), BATCH_KEYS):
            blobs = self._server.read(keys[first : first + BATCH_KEYS])
            yield from blobs.items()

    # Writing

    def put_many(self, items: Sequence[tuple[bytes, Blob]], owner: str = "") -> int:
        blobs = {key: bytes(blob) for key, blob in items}
        if not blobs:
            return 0
        with self._writing:
            there = dict(zip(blobs, self.contains_many(list(blobs)), strict=True))
            with self._lock:
                # Blobs that other processes wrote do not count against our budget.
                sizes = {
                    key: nbytes_on_server(len(blob))
                    for key, blob in blobs.items()
                    if not there[key] or key in self._index
                }
                update = self._index.add(sizes, owner)
            written = self._write(update, blobs)
            gone = {key for key, _ in update.evicted}
            return sum(key in written or (there[key] and key not in gone) for key in blobs)

    def replace(self, key: bytes, blob: Blob, owner: str = "") -> bool:
        blobs = {key: bytes(blob)}
        with self._writing:
            with self._lock:
                old = self._index.remove(key)
                update = self._index.add({key: nbytes_on_server(len(blobs[key]))}, owner)
                if not update.added and old is not None:
                    self._index.undo(IndexUpdate([], [(key, old)]))
            return key in self._write(update, blobs)

    def _write(self, update: IndexUpdate, blobs: Mapping[bytes, bytes]) -> set[bytes]:
        """Carry out an update of the index; return the keys that were written.

        Whatever could not be written or removed is undone in the index.

        Raises:
            TierUnavailable: nothing was written.
        """
        written: set[bytes] = set()
        evicted = update.evicted
        try:
            self._evict([key for key, _ in evicted])
            evicted = []
            for manifests in self._server.write({key: blobs[key] for key in update.added}):
                written |= manifests.keys()
                with self._lock:
                    self._manifests |= manifests
        except TierUnavailable:
            if not written:
                raise
        finally:
            failed = [key for key in update.added if key not in written]
            with self._lock:
                self._index.undo(IndexUpdate(failed, evicted))
                for key in failed:
                    self._manifests.pop(key, None)
        return written

    def _evict(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            manifests = {key: self._manifests[key] for key in keys if key in self._manifests}
        self._server.remove(manifests)
        with self._lock:
            for key in manifests:
                self._manifests.pop(key, None)
            self._num_evictions += len(keys)

    def delete_many(self, keys: Iterable[bytes]) -> int:
        keys = list(dict.fromkeys(keys))
        count = 0
        with self._writing:
            for first in range(0, len(keys), BATCH_KEYS):
                batch = keys[first : first + BATCH_KEYS]
                count += self._server.delete(batch)
                self._forget(batch)
        return count

    def drop_quarantine(self) -> None:
        """Do nothing: what is damaged is deleted."""

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Stop counting blobs that the server no longer has."""
        with self._lock:
            for key in keys:
                if self._manifests.pop(key, None) is not None:  # else it is being written now
                    self._index.remove(key)

    # Recency

    def own(self, owner: str, keys: Sequence[bytes], idle_s: float = 0.0) -> None:
        with self._lock:
            self._index.own(owner, keys, idle_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just used, here and on the server as far as it answers."""
        with self._lock:
            self._index.touch(keys)
            manifests = {
                key: self._manifests[key] for key in reversed(keys) if key in self._manifests
            }
        with contextlib.suppress(TierUnavailable):
            if self._expires:  # blobs of other processes must not run out while we use them
                manifests |= self._server.manifests([key for key in keys if key not in manifests])
            self._server.touch(manifests)

    def pin(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._index.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._index.unpin(keys)

    # Life

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name=self.name,
                nbytes=self._index.nbytes,
                capacity_bytes=self._index.capacity_bytes,
                num_blobs=len(self._index),
                evictions=self._num_evictions,
                errors=self._link.num_errors,
                available=self._link.available,
            )

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        with self._lock:
            return self._index.why_evicted(keys)

    def flush(self) -> None:
        """Do nothing: a call that writes returns when the server has the blob."""

    def close(self) -> None:
        self._link.close()
