"""The Redis tier: blobs on a Redis or Valkey server that several engines may share.

**The server decides which blobs exist.** It may evict any entry, restart empty or be gone:
``contains_many`` asks it, and a blob counts only if all of it comes back (``blobs``).

**Budget.** ``capacity_bytes`` bounds the blobs that one writer wrote and has not deleted, in all
its lives. An engine with a ``WriterName`` has a ``book`` on the server. Blobs of earlier lives are
entered from there, as less recent than all blobs of this life, on a thread of its own, once the
store has pinned those of pinned sessions (``book``). Blobs of another engine count in that engine's
budget, and only it evicts them. Without a name the budget ends with this object. Blobs that no
engine counts any more are bounded by the server's own ``maxmemory`` and policy (``allkeys-lru``
suits) and by ``ttl_s``. A full server refuses a blob, which is counted. It does not know pins.

**Time.** Each exchange with the server has ``deadline_s``. ``get_many`` has one such deadline for
the whole call and returns the blobs that came in time. After three failures in a row every call
raises ``TierUnavailable`` at once, until a probe succeeds (``link.Breaker``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.errors import TierUnavailable
from kvstore.tenant_bytes import TenantLimits, TenantUse
from kvstore.tiers.base import Blob
from kvstore.tiers.earlier_life import Found
from kvstore.tiers.indexed_tier import IndexedTier
from kvstore.tiers.redis_server.blobs import BATCH_KEYS, RedisBlobs, WriteInterrupted
from kvstore.tiers.redis_server.book import (
    ENTRY_BYTES,
    PINS_S,
    Book,
    BookEntry,
    EarlierLives,
    WriterName,
    Written,
    last_writes,
)
from kvstore.tiers.redis_server.early_uses import EarlyUses
from kvstore.tiers.redis_server.fragments import BlobManifest, nbytes_on_server
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.return_order import Evicted, ReturnOrder, Update

OWED_FILE: Final = "redis-deletions"  # in the engine's folder


class RedisTier(IndexedTier):
    """Implements ``base.Tier`` on the server at ``url``, to which the first use connects.

    Args:
        deadline_s: for one exchange with the server.
        ttl_s: entries expire this long after they were written or touched; 0 = never.
        writer: the name that owns the budget; released by ``close``. None = this object alone.

    Raises:
        ValueError: not a URL.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        capacity_bytes: int,
        *,
        deadline_s: float,
        ttl_s: float = 0.0,
        writer: WriterName | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = RedisLink(url, deadline_s, monotonic)
        self._writer = writer
        ttl_ms = round(ttl_s * 1000)
        self._book = Book(self._link, writer.text, ttl_ms) if writer is not None else None
        self._server = RedisBlobs(self._link, ttl_ms, self._book)
        self._expires = ttl_s > 0
        self._writing = threading.Lock()  # one writer; always taken before the other lock
        self._lock = threading.Lock()  # the fields below; not held during calls to the server
        self._index = ReturnOrder(capacity_bytes, monotonic)
        self._manifests: dict[bytes, BlobManifest] = {}  # of written blobs of the index
        # Blobs that may exist on the server, since it failed while writing; they do not count.
        self._doubtful: list[Mapping[bytes, BlobManifest]] = []
        self._num_evictions = 0
        self._said: dict[bytes, str] = {}  # owners of blobs that are not entered yet
        self._entering = self._book is not None  # until all blobs of earlier lives are entered
        self._early = EarlyUses(self._entering)
        self._earlier: EarlierLives | None = None
        if self._book is not None:
            self._earlier = EarlierLives(self._book, self._enter_earlier, self._end_entering)

    def __repr__(self) -> str:
        return f"RedisTier({self._link.name})"

    @property
    def owed_file(self) -> Path | None:
        folder = self._writer.folder if self._writer is not None else None
        return None if folder is None else folder / OWED_FILE

    def _cost(self, length: int) -> int:
        return nbytes_on_server(length) + (ENTRY_BYTES if self._book is not None else 0)

    def count_earlier_lives(self, pins_s: float = PINS_S) -> None:
        """Begin to enter blobs of this writer's earlier lives, without waiting. Call once.

        ``pins_s``: if ``pins_known`` was not called for so long, they are entered without.
        """
        if self._earlier is not None:
            self._earlier.start(pins_s)

    def pins_known(self) -> None:
        if self._earlier is not None:
            self._earlier.pins_known()

    def greet(self) -> None:
        """Ask the server for an answer, so that ``stats`` shows it before the first blob."""
        with contextlib.suppress(TierUnavailable):  # the link has counted and logged it
            self._link.run([("PING",)])

    # Reading

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        blobs = self._server.read(keys)
        return [blobs.get(key) for key in keys]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        known = self._known(keys)
        found = self._server.exist(keys)
        gone = {key for key, there in zip(keys, found, strict=True) if there is False}
        self._forget({key: x for key, x in known.items() if key in gone})
        return [bool(there) for there in found]

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        found = self._server.manifests(keys)
        return [found[key].length if key in found else None for key in keys]

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        keys = self._server.find(prefix)
        for first in range(0, len(keys), BATCH_KEYS):
            blobs = self._server.read(keys[first : first + BATCH_KEYS])
            yield from blobs.items()

    # Writing

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        blobs = dict(items)
        if not blobs:
            return 0
        with self._writing:
            self._drop_doubtful()
            there = dict(zip(blobs, self.contains_many(list(blobs)), strict=True))
            with self._lock:
                # Blobs that other processes wrote do not count against our budget.
                sizes = {
                    key: self._cost(len(blob))
                    for key, blob in blobs.items()
                    if not there[key] or key in self._index
                }
                self._early.note(blobs)
                update = self._index.add(sizes, owner, after if after in self._index else b"")
            written = self._write(update, blobs)
            gone = {key for key, _, _ in update.evicted}
            return sum(key in written or (there[key] and key not in gone) for key in blobs)

    def replace(
        self,
        key: bytes,
        blob: Blob,
        owner: str = "",
        instead_of: bytes = b"",
        after: bytes = b"",
    ) -> bool:
        blobs = {key: blob}
        before = instead_of or key
        with self._writing:
            self._drop_doubtful()
            if instead_of and not self._known([before]):
                return False
            with self._lock:
                self._early.note(blobs)
                cost = self._cost(len(blobs[key]))
                update = self._index.replace(key, cost, owner, after, instead_of)
                if not update.added:
                    self._index.undo(update)
                    return False
            # The replaced blob is removed, or overwritten, once the new one is written.
            rest = [x for x in update.evicted if x.key != before]
            old = [x for x in update.evicted if x.key == before] if instead_of else []
            written = self._write(update._replace(evicted=rest), blobs, old)
            if written and instead_of:
                with self._lock:
                    manifest = self._manifests.pop(before, None)
                self._doubtful.append({} if manifest is None else {before: manifest})
                self._drop_doubtful()
            return bool(written)

    def _write(
        self, update: Update, blobs: Mapping[bytes, Blob], old: Sequence[Evicted] = ()
    ) -> set[bytes]:
        """Carry out an update of the index; return the keys that were written.

        Blobs that could not be written or removed are undone in the index.

        Args:
            old: a blob whose place the added one takes, until that is written.

        Raises:
            TierUnavailable: nothing was written.
        """
        written: set[bytes] = set()
        before: dict[bytes, BlobManifest] = {}
        evicted = update.evicted
        try:
            self._evict([key for key, _, _ in evicted])
            evicted = []
            before = self._take_known(update.added)
            for manifests in self._server.write({key: blobs[key] for key in update.added}):
                written |= manifests.keys()
                with self._lock:
                    self._manifests |= manifests
                if self._book is not None:  # another engine may have replaced the older ones
                    self._book.owe((key, x) for key, x in before.items() if key in manifests)
        except TierUnavailable as error:
            if isinstance(error, WriteInterrupted):
                # The blobs that they were to replace do not count any more either.
                older = {key: x for key, x in before.items() if key not in written}
                self._doubtful += [error.manifests, older]
            if not written:
                raise
        finally:
            failed = [key for key in update.added if key not in written]
            with self._lock:
                undone = Update(failed, [*old, *evicted], update.in_place and bool(old))
                lost = self._index.undo(undone if failed else Update([], evicted))
                for key in failed:
                    self._manifests.pop(key, None)
            self._doubt(lost)
        return written

    def _drop_doubtful(self) -> None:
        """Remove blobs that may have been written after all, before a caller counts on them."""
        while self._doubtful:
            self._server.evict(self._doubtful[-1])
            self._doubtful.pop()

    def _take_known(self, keys: Sequence[bytes]) -> dict[bytes, BlobManifest]:
        """Return our manifests of these blobs; meanwhile no call can ``_forget`` them."""
        known = self._known(keys)
        with self._lock:
            for key in known:
                del self._manifests[key]
        return known

    def _known(self, keys: Iterable[bytes]) -> dict[bytes, BlobManifest]:
        """Return our manifests of these blobs, if they count and are not being written."""
        with self._lock:
            return {key: self._manifests[key] for key in keys if key in self._manifests}

    def _evict(self, keys: Sequence[bytes]) -> None:
        manifests = self._known(keys)
        self._server.evict(manifests)
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
                self._forget(self._known(batch))
        return count

    def drop_quarantine(self) -> None:
        """Do nothing: damaged blobs are deleted."""

    def _forget(self, written: Mapping[bytes, BlobManifest]) -> None:
        """Stop counting blobs that the server no longer has, unless they were written again."""
        gone, lost = list[Written](), list[bytes]()
        with self._lock:
            for key, manifest in written.items():
                if self._manifests.get(key) == manifest:
                    del self._manifests[key]
                    lost += self._index.remove([key])
                    gone.append((key, manifest))
        if self._book is not None:
            self._book.owe(gone)
        self._doubt(lost)

    def _doubt(self, keys: Iterable[bytes]) -> None:
        """Remove blobs that no longer count, before the next one is written."""
        with self._lock:
            found = {key: self._manifests.pop(key) for key in keys if key in self._manifests}
            self._doubtful[:0] = [found] if found else []

    # Earlier lives

    def _enter_earlier(self, entries: Sequence[BookEntry]) -> None:
        """Count these as the least recent, evict beyond the budget, strike those not visible.

        Raises:
            TierUnavailable: some are counted, and some of those were to be evicted.
        """
        with self._writing:
            seen = self._seen(entries)
            unseen = [(x.key, x.manifest) for x in entries if seen.get(x.key) != x.manifest]
            self._server.drop_fragments(unseen)  # the server may still have some
            with self._lock:
                new = {key: x for key, x in seen.items() if key not in self._index}
                self._index.load({key: Found(self._cost(x.length)) for key, x in new.items()})
                self._manifests |= new
                for key in new:
                    self._index.own(self._said.pop(key, ""), [key])
                for key in reversed(self._early.among(seen)):  # their chains are not known
                    self._index.touch([key], restored=False)
                evicted = self._index.evict()
            self._write(Update([], evicted), {})

    def _seen(self, entries: Sequence[BookEntry]) -> dict[bytes, BlobManifest]:
        known = self._known([x.key for x in entries])
        unknown = [x for x in entries if x.key not in known]
        return known | last_writes(unknown, self._server.exist, self._server.manifests)

    def _end_entering(self) -> None:
        self.touch(self._early.all())  # the order among batches, and in the book
        with self._lock:
            self._early.end()
            self._entering = False
            self._said = {}

    @property
    def knows_earlier_lives(self) -> bool:
        """True once all blobs of earlier lives are counted."""
        return not self._entering

    def written(self, prefix: bytes) -> list[bytes] | None:
        now = super().written(prefix) or []
        if self._earlier is None or self.knows_earlier_lives:
            return now
        with contextlib.suppress(TierUnavailable):
            if (listed := self._earlier.listed(prefix)) is not None:
                before = {key: None for batch in listed for key in self._seen(batch)}
                return [*reversed(before), *(x for x in now if x not in before)]
        return None

    def limit_tenants(self, limits: TenantLimits) -> dict[str, TenantUse] | None:
        return super().limit_tenants(limits) if self.knows_earlier_lives else None

    # Recency

    def _apply_limits(self, limits: TenantLimits) -> None:
        with self._writing:
            with self._lock:
                update = Update([], self._index.limit(limits))
            if update.evicted:
                self._write(update, {})

    def own(self, owner: str, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._index.own(owner, keys)
            if self._entering:
                self._said |= {key: owner for key in keys if key not in self._index}

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        """Mark a chain as just used, here and, as far as it answers, on the server."""
        with self._lock:
            self._early.note(keys)
            self._index.touch(keys, restored=restored)
            manifests = {
                key: self._manifests[key] for key in reversed(keys) if key in self._manifests
            }
        others: dict[bytes, BlobManifest] = {}
        with contextlib.suppress(TierUnavailable):
            if self._expires:  # blobs of other processes must not expire while we use them
                others = self._server.manifests([key for key in keys if key not in manifests])
            self._server.touch(manifests, others)

    # Life

    def _health(self) -> tuple[int, bool]:
        return self._link.num_errors, self._link.available

    def flush(self) -> None:
        """Do nothing: a writing call returns only when the server has the blob."""

    def close(self) -> None:
        if self._earlier is not None:
            self._earlier.close()
        self._link.close()
        if self._writer is not None:
            self._writer.release()
