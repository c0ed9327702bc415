"""The disk tier: blobs in an LMDB file, which survive a restart, inside a budget of file pages.

**Crashes.** A kill -9 at any moment loses nothing that was committed; the batch that was being
written is stored completely or not at all. A power cut may lose the last commit (``batch_bytes``),
never the file. Two facts are stored with each blob: the key before it in its chain, so that a chain
is evicted from its end after a restart, too, and the time it was written, which is the order of
eviction if the budget was lowered. When a session was last used is in its record, which the store
reads at the start (``own``).

**Budget.** ``capacity_bytes`` bounds the live blobs, counted in whole pages. The file also holds
pages that are free but not reusable yet, and some gaps; it never exceeds ``file_bytes_limit``
(see ``disk_budget``), because LMDB's memory map ends there. When a commit reaches that end, the
tier evicts blobs, waits until LMDB can reuse their pages, and tries again, evicting more each time.

**Faults.** If the disk or the map is full, blobs are refused and the error is counted. Any other
error of the file system is counted and raised as ``TierUnavailable``. If LMDB's tree is found
damaged, at the start or while in use, the file is deleted and the tier continues empty. A read
error of the disk under the map cannot be turned into a miss: it arrives as SIGBUS and ends the
engine, whose next start verifies the file.

Readers never wait for writers. The map is read through the page cache, so it counts as shared,
reclaimable memory of the process. Pages of deleted blobs keep their content until LMDB reuses them;
``store.encrypt`` hides it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import lmdb

from kvstore.errors import TierUnavailable
from kvstore.session import TenantLimits
from kvstore.tiers.base import Blob
from kvstore.tiers.disk_budget import batch_bytes, file_bytes_limit
from kvstore.tiers.disk_folder import SPARE_MAP_BYTES, DiskFolder
from kvstore.tiers.lmdb_blobs import CallGuard, LmdbBlobs, is_want_of_room
from kvstore.tiers.ram_tier import IndexedTier
from kvstore.tiers.return_order import ReturnOrder, Update, stated_size
from kvstore.tiers.runs import links_before

# Bounded, since no eviction helps while a slow reader keeps the pages from being reused.
MAX_EVICT_RETRIES = 4


class DiskTier(IndexedTier[int]):
    """Implements ``base.Tier`` in ``folder``, which belongs to this object alone until ``close``.

    Raises:
        TierInUse: another process uses the folder.
        TierUnavailable: the folder cannot be used.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._guard = CallGuard()
        self._writing = threading.Lock()  # one writer; always taken before the other lock
        self._lock = threading.Lock()  # for the fields below; held briefly
        self._index = ReturnOrder(capacity_bytes, monotonic, stated_size)
        self._batch_bytes = batch_bytes(capacity_bytes)
        self._stale: set[bytes] = set()  # keys in the file that are no longer in the index
        self._num_evictions = 0
        self._places: dict[bytes, bytes] = {}  # by key of a blob to be written: the link before it
        self._folder = DiskFolder(folder)
        try:
            self._open()
        except (lmdb.Error, OSError) as error:
            self._folder.release(clean=False)
            raise TierUnavailable(f"the disk tier cannot open {folder}: {error}") from error
        except TierUnavailable:
            self._folder.release(clean=False)
            raise

    def _open(self) -> None:
        limit = file_bytes_limit(self._index.capacity_bytes)
        self._env = self._folder.open(limit)
        try:
            try:
                self._load(limit)
            except lmdb.Error as error:
                self._env = self._folder.start_over_if_damaged(self._env, limit, error)
                self._load(limit)
        except (lmdb.Error, OSError, TierUnavailable):
            self._env.close()
            raise

    def _mend(self) -> None:
        """Replace the file by an empty one if a call has found it damaged."""
        if not self._guard.damaged:
            return
        # ``mend`` waits for running calls, some of which need ``_writing``: so it is taken second.
        with self._guard.mend() as damaged, self._writing:
            if not damaged:
                return
            limit = file_bytes_limit(self._index.capacity_bytes)
            self._env = self._folder.start_over(self._env, limit, why="damage found while in use")
            self._blobs = LmdbBlobs(self._env)
            self._env.set_mapsize(limit)
            with self._lock:  # pins stay
                self._index.remove(self._index.keys(b""))
                self._stale.clear()

    def _load(self, limit: int) -> None:
        """Build the index from the file, and shrink the file if the budget was lowered."""
        self._index = ReturnOrder(self._index.capacity_bytes, self._monotonic, stated_size)
        self._blobs = LmdbBlobs(self._env)
        with self._env.begin(buffers=True) as txn:
            entries = sorted(self._blobs.entries(txn), key=lambda x: x[1].written_s)
        sizes = {key: self._blobs.nbytes(entry.length) for key, entry in entries}
        self._index.load(sizes, {key: entry.after for key, entry in entries})
        evicted = self._index.evict()
        try:
            self._commit(evicted, {})
            self._force_commit()
        except lmdb.MapFullError:
            self._env.set_mapsize(limit + SPARE_MAP_BYTES)
            self._commit(evicted, {})
        if self._folder.data.stat().st_size > limit:
            self._env = self._folder.compact(self._env, limit)
            self._load(limit)
        else:
            self._env.set_mapsize(limit)

    # Reading

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        with self._guard.call(), self._env.begin(buffers=True) as txn:
            return [self._blobs.read(txn, key) for key in keys]

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        with self._guard.call(), self._env.begin(buffers=True) as txn:
            found = [self._blobs.entry(txn, key) for key in keys]
        return [None if entry is None else entry.length for entry in found]

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        with self._lock:
            found = sorted(self._index.keys(prefix))
        for key in found:
            (blob,) = self.get_many([key])
            if blob is not None:
                yield key, blob

    # Writing

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        blobs = {key: memoryview(blob).cast("B") for key, blob in items}
        self._mend()
        with self._guard.call(), self._writing:
            with self._lock:
                self._places = links_before(blobs, self._index.link_at(after))
                update = self._index.add(self._sizes(blobs), owner, after)
            self._write(update, blobs)
        with self._lock:
            return sum(key in self._index for key in blobs)

    def replace(self, key: bytes, blob: Blob, owner: str = "", after: bytes = b"") -> bool:
        blobs = {key: memoryview(blob).cast("B")}
        self._mend()
        with self._guard.call(), self._writing:
            place = self._place_of(key)
            with self._lock:
                nbytes = self._sizes(blobs)[key]
                self._places = {key: self._index.link_at(after) if after else place}
                update = self._index.replace(key, nbytes, owner, after)
            # ``blobs`` also keeps the replaced blob from being counted as evicted.
            return self._write(update, blobs) and bool(update.added)

    def delete_many(self, keys: Iterable[bytes]) -> int:
        self._mend()
        with self._guard.call(), self._writing:
            keys = list(dict.fromkeys(keys))
            with self._lock:
                present = [key for key in keys if key in self._index]
                doomed = [*self._index.doomed(present), *self._stale.intersection(keys)]
            if doomed:
                self._commit(doomed, {})
            with self._lock:
                self._index.remove(doomed)
            return len(present)

    def _place_of(self, key: bytes) -> bytes:
        """Return the link before a stored blob in its chain; b"" if there is none."""
        with self._env.begin(buffers=True) as txn:
            entry = self._blobs.entry(txn, key) if key else None
        return entry.after if entry is not None else b""

    def _sizes(self, blobs: Mapping[bytes, memoryview]) -> dict[bytes, int]:
        return {key: self._blobs.nbytes(len(blob)) for key, blob in blobs.items()}

    def _write(self, update: Update, blobs: Mapping[bytes, memoryview]) -> bool:
        """Write an update of the index to the file, batch by batch; False if a blob was refused.

        Blobs that could not be written are removed from the index. Blobs that could not be deleted
        are deleted by a later commit.

        Raises:
            lmdb.Error: any error except lack of space.
        """
        pending, evicted = list(update.added), list(update.evicted)
        try:
            while pending or evicted:
                batch = _first_batch(pending, blobs, self._batch_bytes)
                self._commit_batch(evicted, batch, blobs)
                del pending[: len(batch)]
        except lmdb.Error as error:
            kept = {*pending}.intersection(evicted)  # the blob to be replaced is still there
            with self._lock:
                lost = self._index.remove(x for x in pending if x not in kept)
                self._stale.update(lost, kept.symmetric_difference(evicted))
            if not is_want_of_room(error):
                raise
            self._guard.count(error)
            if self._stale:
                self._commit([], {})
        return not pending

    def _commit_batch(
        self,
        evicted: list[bytes],
        batch: Mapping[bytes, memoryview],
        spare: Mapping[bytes, memoryview],
    ) -> None:
        """Delete the evicted blobs and write a batch; if the file is too full, evict more.

        Args:
            evicted: keys of blobs to delete; the list is cleared once they are deleted.
            spare: the blobs of the whole update, which must not be evicted for ``batch``.
        """
        try:
            self._commit_evicted(evicted, batch, spare)
            return
        except lmdb.MapFullError:
            nbytes = sum(self._sizes(batch).values())
        for attempt in range(1, MAX_EVICT_RETRIES + 1):
            if evicted:
                self._commit_evicted(evicted, {}, spare)
            self._force_commit()
            try:
                self._commit([], batch)
                return
            except lmdb.MapFullError:
                if attempt == MAX_EVICT_RETRIES:
                    raise
            with self._lock:
                evicted += self._index.evict(nbytes, spare)

    def _commit_evicted(
        self,
        evicted: list[bytes],
        batch: Mapping[bytes, memoryview],
        spare: Mapping[bytes, memoryview],
    ) -> None:
        self._commit(evicted, batch)
        with self._lock:
            self._num_evictions += sum(key not in spare for key in evicted)
        evicted.clear()

    def _commit(self, gone: Iterable[bytes], new: Mapping[bytes, memoryview]) -> None:
        """Delete and write blobs in one transaction."""
        with self._env.begin(write=True, buffers=True) as txn:
            for key in {*gone, *self._stale}:
                self._blobs.delete(txn, key)
            for key, blob in new.items():
                self._blobs.write(txn, key, blob, self._places[key])
        self._stale.clear()

    def _force_commit(self) -> None:
        """Commit without a change: LMDB reuses pages two commits after the one that freed them."""
        with self._env.begin(write=True, buffers=True) as txn:
            self._blobs.force_commit(txn)

    # Recency

    def _apply_limits(self, limits: TenantLimits) -> None:
        with self._guard.call(), self._writing:
            with self._lock:
                update = Update([], self._index.limit(limits))
            self._write(update, {})

    # Life

    def _health(self) -> tuple[int, bool]:
        return self._guard.num_errors, not self._guard.damaged

    def flush(self) -> None:
        with self._guard.call(), self._writing:
            self._env.sync(True)

    def close(self) -> None:
        """Wait for running calls, sync, and release the folder. May be called twice."""
        if not self._guard.close():
            return
        clean = not self._guard.damaged
        try:
            if clean:
                self._env.sync(True)
        except lmdb.Error as error:
            self._guard.count(error)
            clean = False
        self._env.close()
        self._folder.release(clean=clean)


def _first_batch(
    pending: Sequence[bytes], blobs: Mapping[bytes, memoryview], max_bytes: int
) -> dict[bytes, memoryview]:
    """Return the first pending blobs, as many as one commit takes, and at least one."""
    batch: dict[bytes, memoryview] = {}
    total = 0
    for key in pending:
        total += len(blobs[key])
        if batch and total > max_bytes:
            break
        batch[key] = blobs[key]
    return batch
