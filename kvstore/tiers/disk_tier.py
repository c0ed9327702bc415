"""Blobs in an LMDB file: they survive a restart, inside a byte budget of real file pages.

**What a crash costs.** A kill -9 at any moment: nothing that was committed; a batch in flight is
either whole or absent. A power cut: also the last commit (``batch_bytes``), never the file. Recency
is written along with the next commit; after a crash the order may be that old.

**Budget.** ``capacity_bytes`` bounds the live blobs, counted in whole pages. The file also holds
pages that are free but not reusable yet and some fragments; it never exceeds ``file_bytes_limit``
(see ``disk_budget``), because LMDB's map ends there. When a commit meets that end, the tier evicts
first, lets the pages come free, and tries again, evicting more each time.

**Faults.** A full disk or map: the blobs are refused and counted. Any other error of the file
system: counted, ``TierUnavailable``. A tree found damaged while in use: the tier stays unavailable
and the next start sets the file aside. One thing cannot be turned into a miss: a medium error
*under* the map arrives as SIGBUS and ends the engine; its next start verifies the file.

Readers never wait for writers. Forgotten and replaced blobs are overwritten in place, evicted ones
are not: see ``disk_pages``. The map is read through the page cache: it shows as shared, reclaimable
memory of the process, not as its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import lmdb

from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Blob, TierStats
from kvstore.tiers.disk_budget import batch_bytes, file_bytes_limit
from kvstore.tiers.disk_folder import SPARE_MAP_BYTES, DiskFolder
from kvstore.tiers.disk_gate import DiskGate, is_want_of_room
from kvstore.tiers.disk_pages import Pages, Place, erase
from kvstore.tiers.lru import Admission, Entry, RecencyIndex

MAX_LOOKS = 4
MAX_SQUEEZES = 4  # a reader that takes long keeps pages from coming free; do not evict all for it


class DiskTier:
    """Blobs in ``folder``, which belongs to this object alone until ``close``.

    Raises:
        TierUnavailable: the folder is in use by another process, or cannot be used.
    """

    name = "disk"
    persistent = True

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._gate = DiskGate()
        self._writing = threading.Lock()  # one writer; always taken before the other lock
        self._lock = threading.Lock()  # the fields below; held briefly
        self._index = RecencyIndex(capacity_bytes)
        self._batch_bytes = batch_bytes(capacity_bytes)
        self._unsaved: set[bytes] = set()  # keys whose recency is not in the file yet
        self._num_evictions = 0
        self._erasing: frozenset[bytes] = frozenset()  # being overwritten before they are deleted
        self._num_erasures = 0
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
            except lmdb.CorruptedError as error:
                self._env = self._folder.start_over(self._env, limit, why=str(error))
                self._load(limit)
        except (lmdb.Error, OSError, TierUnavailable):
            self._env.close()
            raise

    def _load(self, limit: int) -> None:
        """Build the index, and bring the file inside the budget if that was lowered."""
        self._index = RecencyIndex(self._index.capacity_bytes)
        self._pages = Pages(self._env)
        with self._env.begin(buffers=True) as txn:
            stored = sorted(self._pages.everything(txn), key=lambda item: item[1].stamp)
        for key, entry in stored:
            self._index.insert(key, self._pages.nbytes(entry.length), entry.stamp)
        victims = [key for key, _ in self._index.shrink()]
        try:
            self._commit(victims, {})
            self._turn()
        except lmdb.MapFullError:
            self._env.set_mapsize(limit + SPARE_MAP_BYTES)
            self._commit(victims, {})
        if self._folder.data.stat().st_size > limit:
            self._env = self._folder.compact(self._env, limit)
            self._load(limit)
        else:
            self._env.set_mapsize(limit)

    @property
    def overhead_bytes(self) -> int:
        return self._pages.nbytes(1)  # the smallest blob is nothing but that

    # Reading

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        """Never the zeros of a blob that is being erased, unless erasing goes on and on; even then
        the store's checksum makes them a miss."""
        with self._gate.call():
            for _ in range(MAX_LOOKS):
                with self._lock:
                    before, hidden = self._num_erasures, self._erasing
                with self._env.begin(buffers=True) as txn:
                    found = [None if x in hidden else self._pages.read(txn, x) for x in keys]
                with self._lock:
                    if self._num_erasures == before:
                        break
            return list(found)

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        with self._lock:
            found = sorted(key for key in self._index if key.startswith(prefix))
        for key in found:
            (blob,) = self.get_many([key])
            if blob is not None:
                yield key, blob

    # Writing

    def put_many(self, items: Sequence[tuple[bytes, Blob]]) -> int:
        blobs = {key: memoryview(blob).cast("B") for key, blob in items}
        with self._gate.call(), self._writing:
            with self._lock:
                admission = self._index.admit(self._sizes(blobs))
                self._unsaved.update(blobs)
            self._write(admission, blobs, [])
        with self._lock:
            return sum(key in self._index for key in blobs)

    def replace(self, key: bytes, blob: Blob) -> bool:
        blobs = {key: memoryview(blob).cast("B")}
        with self._gate.call(), self._writing:
            remains = self._places([key])
            with self._lock:
                old = self._index.remove(key)
                admission = self._index.admit(self._sizes(blobs))
                self._unsaved.add(key)
                if old is not None:
                    admission.victims.append((key, old))
                if not admission.new:
                    self._index.retract(admission)
                    return False
            return self._write(admission, blobs, remains)

    def delete_many(self, keys: Iterable[bytes]) -> int:
        with self._gate.call(), self._writing:
            with self._lock:
                present = [key for key in dict.fromkeys(keys) if key in self._index]
                self._erasing = frozenset(present)
                self._num_erasures += 1
            try:
                if present:
                    self._erase(self._places(present))
                    self._commit(present, {})
                with self._lock:
                    for key in present:
                        self._index.remove(key)
            finally:
                self._erasing = frozenset()
            return len(present)

    def _sizes(self, blobs: Mapping[bytes, memoryview]) -> dict[bytes, int]:
        return {key: self._pages.nbytes(len(blob)) for key, blob in blobs.items()}

    def _write(
        self,
        admission: Admission,
        blobs: Mapping[bytes, memoryview],
        remains: list[Place],
    ) -> bool:
        """Make an admission true, batch by batch; what fails is taken back. True if all is written.

        Args:
            remains: of a victim, to be overwritten once it is gone; emptied.

        Raises:
            lmdb.Error: anything but want of room.
        """
        pending, victims = list(admission.new), list(admission.victims)
        try:
            while pending or victims:
                batch = self._first_batch(pending, blobs)
                self._commit_batch(victims, batch, blobs, remains)
                del pending[: len(batch)]
        except lmdb.Error as error:
            with self._lock:
                self._index.retract(Admission(pending, victims))
            if not is_want_of_room(error):
                raise
            self._gate.count(error)
        return not pending

    def _commit_batch(
        self,
        victims: list[tuple[bytes, Entry]],
        batch: Mapping[bytes, memoryview],
        spare: Mapping[bytes, memoryview],
        remains: list[Place],
    ) -> None:
        """Commit; where the file has no room for all of it at once, evict first, and then more.

        Args:
            victims: emptied as soon as they are gone.
            spare: what is not to be evicted for ``batch``.
        """
        try:
            self._commit_evicting(victims, batch, spare, remains)
            return
        except lmdb.MapFullError:
            nbytes = sum(self._sizes(batch).values())
        for attempt in range(1, MAX_SQUEEZES + 1):
            if victims:
                self._commit_evicting(victims, {}, spare, remains)
            self._turn()
            try:
                self._commit([], batch)
                return
            except lmdb.MapFullError:
                if attempt == MAX_SQUEEZES:
                    raise
            with self._lock:
                victims += self._index.evict(nbytes, spare)

    def _commit_evicting(
        self,
        victims: list[tuple[bytes, Entry]],
        batch: Mapping[bytes, memoryview],
        spare: Mapping[bytes, memoryview],
        remains: list[Place],
    ) -> None:
        self._commit([key for key, _ in victims], batch)
        with self._lock:
            self._num_evictions += sum(key not in spare for key, _ in victims)
            self._num_erasures += bool(remains)  # after the commit: whoever looks now sees the new
        victims.clear()
        self._erase(remains)
        remains.clear()

    def _first_batch(
        self, pending: Sequence[bytes], blobs: Mapping[bytes, memoryview]
    ) -> dict[bytes, memoryview]:
        batch: dict[bytes, memoryview] = {}
        total = 0
        for key in pending:
            total += len(blobs[key])
            if batch and total > self._batch_bytes:
                break
            batch[key] = blobs[key]
        return batch

    def _commit(self, gone: Iterable[bytes], new: Mapping[bytes, memoryview]) -> None:
        """One transaction: delete, write, and save the recency that changed since the last one."""
        with self._lock:
            changed, self._unsaved = self._unsaved, set()
            entries = {key: self._index.entry(key) for key in changed.union(new)}
        stamps = {key: entry.stamp for key, entry in entries.items() if entry is not None}
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                for key in gone:
                    self._pages.delete(txn, key)
                for key, blob in new.items():
                    self._pages.write(txn, key, blob, stamps[key])
                for key in stamps.keys() - new.keys():
                    self._pages.restamp(txn, key, stamps[key])
        except lmdb.Error:
            with self._lock:
                self._unsaved |= changed
            raise

    def _turn(self) -> None:
        """LMDB reuses pages two commits after the one that freed them; this is one between."""
        with self._env.begin(write=True, buffers=True) as txn:
            self._pages.turn(txn)

    def _places(self, keys: Iterable[bytes]) -> list[Place]:
        with self._env.begin(buffers=True) as txn:
            return [place for key in keys for place in self._pages.places(txn, key)]

    def _erase(self, places: Iterable[Place]) -> None:
        """What cannot be overwritten is counted, and deleted all the same."""
        for place in places:
            try:
                if not erase(place, self._folder.data_fd):
                    self._gate.count(OSError("cannot find a forgotten blob to overwrite it"))
            except OSError as error:
                self._gate.count(error)

    # Recency

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._index.touch(keys)
            self._unsaved.update(keys)

    def pin(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._index.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        with self._lock:
            self._index.unpin(keys)
            self._unsaved.update(keys)

    # Life

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name=self.name,
                nbytes=self._index.nbytes,
                capacity_bytes=self._index.capacity_bytes,
                num_blobs=len(self._index),
                evictions=self._num_evictions,
                errors=self._gate.num_errors,
                available=not self._gate.damaged,
            )

    def flush(self) -> None:
        with self._gate.call(), self._writing:
            self._sync()

    def _sync(self) -> None:
        if self._unsaved:
            self._commit([], {})
        self._env.sync(True)

    def close(self) -> None:
        """Wait for the calls inside, sync, and give the folder up. May be called twice."""
        if not self._gate.close():
            return
        clean = not self._gate.damaged
        try:
            if clean:
                self._sync()
        except lmdb.Error as error:
            self._gate.count(error)
            clean = False
        self._env.close()
        self._folder.release(clean=clean)
