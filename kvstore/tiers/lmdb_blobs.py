"""The layout of blobs in LMDB: an index entry each, and fragments of 128 KB; its calls guarded.

    database ``index.4``    key               -> its entry, see ``BlobEntry``, and a checksum
    database ``pieces.1``   key, fragment no. -> 128 KB of the blob, the last fragment shorter

**Fragments**, because LMDB needs consecutive free pages for a value: with whole blobs of mixed
sizes the file grew to 1.2 times its live bytes under steady eviction, with fragments of one size to
1.08, and fragments are also read faster (measured, 512 MB, blobs of 2 KB to 3 MB).

**Every fragment owns two pages or more.** LMDB keeps values below half a page inside the pages of
its tree; short fragments are padded past that, so that their sizes in the file are exact.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import lmdb
import numpy as np
from crc32c import crc32c

from kvstore.errors import TierUnavailable

DATABASES = (b"index.4", b"pieces.1")  # the numbers are the versions of these layouts
FRAGMENT_BYTES = 128 << 10  # of file, header included
HEADER_BYTES = 16  # LMDB 0.9 data format on 64-bit machines, before a value in its own pages
# Keys, node headers and the tree's fill grade of about two thirds, for each fragment.
NODE_BYTES = 128
ENTRY_BYTES = 256  # the same for an index entry, with two keys

MAX_BLOB_BYTES = 1 << 32
_ENTRY = struct.Struct("<Qd")  # blob length, when it was written; then the key before it
_CHECKSUM = struct.Struct("<I")  # crc32c of key and entry
_FRAGMENT_NUMBER = struct.Struct(">H")  # big-endian: fragments of a blob are neighbours in the tree
_NO_KEY = b"\0"  # the store's keys are longer
log = logging.getLogger(__name__)
# EIO: LMDB's error for a write that a full file system cut short.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)


class BlobEntry(NamedTuple):
    """The index entry of one blob: its length, the key before it in its chain, and its time."""

    length: int
    after: bytes
    written_s: float  # by the clock of the machine: a hint in which order to evict


class LmdbBlobs:
    """Reads and writes blobs inside transactions that the caller opens.

    Args:
        env: opened with space for two databases. Not closed here.
    """

    def __init__(self, env: lmdb.Environment) -> None:
        self._index, self._fragments = (env.open_db(name) for name in DATABASES)
        self.page_bytes: int = env.stat()["psize"]
        self.fragment_payload = FRAGMENT_BYTES - HEADER_BYTES

    def nbytes(self, length: int) -> int:
        """The bytes of the file that a blob of ``length`` bytes takes, tree nodes included."""
        whole, rest = divmod(length, self.fragment_payload)
        total = whole * FRAGMENT_BYTES + NODE_BYTES * (whole + 1) + ENTRY_BYTES
        if rest or not whole:
            total += -(-(self._padded(rest) + HEADER_BYTES) // self.page_bytes) * self.page_bytes
        return total

    def _padded(self, length: int) -> int:
        return max(length, self.page_bytes)

    def _num_fragments(self, length: int) -> int:
        return max(1, -(-length // self.fragment_payload))

    def entry(self, txn: lmdb.Transaction[memoryview], key: bytes) -> BlobEntry | None:
        """Return the index entry of a key, None if there is none.

        Raises:
            lmdb.CorruptedError: the entry is damaged.
        """
        packed = txn.get(key, db=self._index)
        return None if packed is None else _unpack(key, bytes(packed))

    def entries(self, txn: lmdb.Transaction[memoryview]) -> list[tuple[bytes, BlobEntry]]:
        """Return keys and index entries of all blobs, without reading the blobs.

        Raises:
            lmdb.CorruptedError: an entry is damaged, or the two databases do not fit together.
        """
        packed_entries = txn.cursor(db=self._index).iternext()
        found = [(bytes(key), _unpack(bytes(key), bytes(packed))) for key, packed in packed_entries]
        names = txn.cursor(db=self._fragments).iternext(keys=True, values=False)
        expected = {
            key + _FRAGMENT_NUMBER.pack(i)
            for key, entry in found
            for i in range(self._num_fragments(entry.length))
        }
        if set(map(bytes, names)) != expected:
            raise lmdb.CorruptedError("fragments without an entry, or an entry without fragments")
        return found

    def read(self, txn: lmdb.Transaction[memoryview], key: bytes) -> bytearray | None:
        """Copy a blob out of the map; None if there is none.

        Without the interpreter's lock: a page that is not in memory is read from the disk here.

        Raises:
            lmdb.CorruptedError: there is an entry, but it or a fragment is damaged.
        """
        entry = self.entry(txn, key)
        if entry is None:
            return None
        if entry.length > MAX_BLOB_BYTES:
            raise lmdb.CorruptedError("an entry of an impossible length")
        blob = bytearray(entry.length)
        out, end = np.frombuffer(blob, np.uint8), 0
        for view in self._views(txn, key, entry.length):
            out[end : end + len(view)] = np.frombuffer(view, np.uint8)
            end += len(view)
        if end != entry.length:
            raise lmdb.CorruptedError("a fragment is missing or short")
        return blob

    def write(
        self, txn: lmdb.Transaction[memoryview], key: bytes, blob: memoryview, after: bytes
    ) -> None:
        """Store a blob whose key is absent; ``blob`` has format ``B`` and is contiguous."""
        step = self.fragment_payload
        for number in range(self._num_fragments(len(blob))):
            fragment = blob[number * step : (number + 1) * step]
            padding = self._padded(len(fragment)) - len(fragment)
            value = bytes(fragment) + bytes(padding) if padding else fragment
            txn.put(key + _FRAGMENT_NUMBER.pack(number), value, db=self._fragments)
        txn.put(key, _pack(key, BlobEntry(len(blob), after, time.time())), db=self._index)

    def delete(self, txn: lmdb.Transaction[memoryview], key: bytes) -> bool:
        """Delete a blob; False if its key is absent."""
        entry = self.entry(txn, key)
        if entry is None:
            return False
        for number in range(self._num_fragments(entry.length)):
            txn.delete(key + _FRAGMENT_NUMBER.pack(number), db=self._fragments)
        txn.delete(key, db=self._index)
        return True

    def force_commit(self, txn: lmdb.Transaction[memoryview]) -> None:
        """Make a commit without changes a real one, so that pages freed earlier are reused."""
        txn.put(_NO_KEY, b"", db=self._index)
        txn.delete(_NO_KEY, db=self._index)

    def _views(
        self, txn: lmdb.Transaction[memoryview], key: bytes, length: int
    ) -> Iterator[memoryview]:
        """Yield the fragments as views into the map, without padding; valid inside ``txn``."""
        for number in range(self._num_fragments(length)):
            view = txn.get(key + _FRAGMENT_NUMBER.pack(number), db=self._fragments)
            if view is not None:
                yield view[: min(self.fragment_payload, length - number * self.fragment_payload)]


def _pack(key: bytes, entry: BlobEntry) -> bytes:
    packed = _ENTRY.pack(entry.length, entry.written_s) + entry.after
    return packed + _CHECKSUM.pack(crc32c(key + packed))


def _unpack(key: bytes, packed: bytes) -> BlobEntry:
    fields, checksum = packed[: -_CHECKSUM.size], packed[-_CHECKSUM.size :]
    if len(fields) < _ENTRY.size or checksum != _CHECKSUM.pack(crc32c(key + fields)):
        raise lmdb.CorruptedError("an index entry is damaged")
    length, written_s = _ENTRY.unpack_from(fields)
    return BlobEntry(length, fields[_ENTRY.size :], written_s)


def is_want_of_room(error: lmdb.Error) -> bool:
    """True if an error means that the map or the file system is full."""
    return isinstance(error, lmdb.MapFullError) or error.code in _NO_ROOM


class CallGuard:
    """Lets calls in until it is closed. Thread-safe.

    Closing an LMDB environment unmaps the file; a thread still reading would crash the process,
    so ``close`` waits until all calls have ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False
        self._damaged = False
        self._mending = False
        self._num_errors = 0

    @property
    def num_errors(self) -> int:
        """The number of errors counted so far."""
        return self._num_errors

    @property
    def damaged(self) -> bool:
        """True if a call found the tree damaged; later ones are refused until it is mended."""
        return self._damaged

    @contextmanager
    def mend(self) -> Iterator[bool]:
        """Keep all calls out while a damaged file is replaced.

        Yields False if there is nothing to mend. If the block raises, the damage remains.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._mending)
            self._mending = self._damaged and not self._closed
            if not self._mending:
                yield False
                return
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield True
            self._damaged = False
        finally:
            with self._changed:
                self._mending = False
                self._changed.notify_all()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Guard one use of the LMDB environment; every use must be inside such a call.

        Raises:
            TierUnavailable: closed, found damaged earlier, or LMDB or the file system failed now.
        """
        self._enter()
        try:
            yield
        except (lmdb.Error, OSError) as error:
            self.count(error)
            raise TierUnavailable(f"disk tier: {error}") from error
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._changed:
            if self._closed:
                raise TierUnavailable("disk tier: closed")
            if self._damaged:
                raise TierUnavailable("disk tier: damaged; it starts empty at the next write")
            self._inside += 1

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def count(self, error: lmdb.Error | OSError) -> None:
        """Count an error; the first one, and the first sign of damage, are logged as well."""
        with self._changed:
            self._num_errors += 1
            damage = isinstance(error, _DAMAGE) and not self._damaged
            self._damaged = self._damaged or damage
            first = self._num_errors == 1
        if first or damage:
            log.warning("disk tier: %s (further errors are only counted)", error)

    def close(self) -> bool:
        """Refuse further calls and wait for those inside; False if it was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0 and not self._mending)
            return True
