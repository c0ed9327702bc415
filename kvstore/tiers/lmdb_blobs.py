"""The layout of blobs in LMDB, one index entry and fragments of 128 KiB each; a guard of its calls.

    database ``index.4``    key               -> its entry, see ``BlobEntry``, and a checksum
    database ``pieces.1``   key, fragment no. -> 128 KiB of the blob, the last fragment shorter

**Fragments** are used because LMDB needs consecutive free pages for a value. With whole blobs of
mixed sizes the file grew to 1.2 times its live bytes under steady eviction, with fragments of one
size to 1.08. Fragments are also read faster (measured with 512 MB, blobs of 2 KB to 3 MB).

**Every fragment has two pages or more of its own.** LMDB keeps values below half a page inside the
pages of its tree. Short fragments are padded to more than that, so that the bytes they take in the
file are known exactly.
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
FRAGMENT_BYTES = 128 << 10  # in the file, header included
HEADER_BYTES = 16  # before a value in its own pages; LMDB 0.9 data format on 64-bit machines
# In the tree for each fragment: key and node header, with pages about two thirds full.
NODE_BYTES = 128
ENTRY_BYTES = 256  # the same for an index entry, which has two keys

MAX_BLOB_BYTES = 1 << 32
_ENTRY = struct.Struct("<Qd")  # blob length, time it was written; then the key before it
_CHECKSUM = struct.Struct("<I")  # crc32c of key and entry
_FRAGMENT_NUMBER = struct.Struct(">H")  # big-endian: fragments of a blob are neighbours in the tree
_NO_KEY = b"\0"  # the store's keys are longer
log = logging.getLogger(__name__)
# EIO is LMDB's error for a write that a full file system cut short.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)


class BlobEntry(NamedTuple):
    """The index entry of one blob."""

    length: int
    after: bytes  # the link before it in its chain; b"" = none
    written_s: float  # wall-clock seconds; only decides the order of eviction after a restart


class LmdbBlobs:
    """Reads and writes blobs inside transactions that the caller opens.

    Args:
        env: opened with ``max_dbs`` of at least two; the caller closes it.
    """

    def __init__(self, env: lmdb.Environment) -> None:
        self._index, self._fragments = (env.open_db(name) for name in DATABASES)
        self.page_bytes: int = env.stat()["psize"]
        self.fragment_payload = FRAGMENT_BYTES - HEADER_BYTES

    def nbytes(self, length: int) -> int:
        """Return the bytes of the file that a blob of ``length`` bytes takes, with tree nodes."""
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
        """Return the index entry of a key; None if there is none.

        Raises:
            lmdb.CorruptedError: the entry is damaged.
        """
        packed = txn.get(key, db=self._index)
        return None if packed is None else _unpack(key, bytes(packed))

    def entries(self, txn: lmdb.Transaction[memoryview]) -> list[tuple[bytes, BlobEntry]]:
        """Return keys and index entries of all blobs, without reading the blobs.

        Raises:
            lmdb.CorruptedError: an entry is damaged, or the two databases disagree.
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
        """Return a copy of a blob; None if there is none.

        numpy copies without the GIL, since a page that is not in memory is read from the disk here.

        Raises:
            lmdb.CorruptedError: there is an entry, but it or a fragment is damaged.
        """
        entry = self.entry(txn, key)
        if entry is None:
            return None
        if entry.length > MAX_BLOB_BYTES:
            raise lmdb.CorruptedError("an entry states an impossible length")
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
        """Write a blob whose key is absent.

        Args:
            blob: contiguous, of format ``B``.
            after: the link before it in its chain; b"" = none.
        """
        step = self.fragment_payload
        for number in range(self._num_fragments(len(blob))):
            fragment = blob[number * step : (number + 1) * step]
            padding = self._padded(len(fragment)) - len(fragment)
            value = bytes(fragment) + bytes(padding) if padding else fragment
            txn.put(key + _FRAGMENT_NUMBER.pack(number), value, db=self._fragments)
        txn.put(key, _pack(key, BlobEntry(len(blob), after, time.time())), db=self._index)

    def delete(self, txn: lmdb.Transaction[memoryview], key: bytes) -> bool:
        """Delete a blob; return False if its key is absent."""
        entry = self.entry(txn, key)
        if entry is None:
            return False
        for number in range(self._num_fragments(entry.length)):
            txn.delete(key + _FRAGMENT_NUMBER.pack(number), db=self._fragments)
        txn.delete(key, db=self._index)
        return True

    def force_commit(self, txn: lmdb.Transaction[memoryview]) -> None:
        """Change the tree and change it back, so that LMDB does not skip an empty commit.

        Each commit makes pages reusable that were freed two commits before.
        """
        txn.put(_NO_KEY, b"", db=self._index)
        txn.delete(_NO_KEY, db=self._index)

    def _views(
        self, txn: lmdb.Transaction[memoryview], key: bytes, length: int
    ) -> Iterator[memoryview]:
        """Yield the fragments of a blob without padding: views of the map, valid during ``txn``."""
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
    """Return whether an error means that the map or the file system is full."""
    return isinstance(error, lmdb.MapFullError) or error.code in _NO_ROOM


class CallGuard:
    """Lets threads use an LMDB environment until it is closed or found damaged. Thread-safe.

    Closing an LMDB environment unmaps the file, and a thread that still reads would crash the
    process. So ``close`` and ``mend`` wait until all calls have ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0  # running calls
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
        """True if a call found the tree damaged; calls are refused until the file is replaced."""
        return self._damaged

    @contextmanager
    def mend(self) -> Iterator[bool]:
        """Keep all calls out while the ``with`` block replaces a damaged file.

        Yields False if there is no damage (any more). If the block raises, the damage remains.
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
        """Guard one use of the LMDB environment; every use must be in such a ``with`` block.

        Raises:
            TierUnavailable: it is closed or damaged, or the block raised an error of LMDB or of
                the file system.
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
        """Count an error; also log the first one, and the first one that shows damage."""
        with self._changed:
            self._num_errors += 1
            damage = isinstance(error, _DAMAGE) and not self._damaged
            self._damaged = self._damaged or damage
            first = self._num_errors == 1
        if first or damage:
            log.warning("disk tier: %s (further errors are only counted)", error)

    def close(self) -> bool:
        """Refuse further calls and wait for running ones; return False if it was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0 and not self._mending)
            return True
