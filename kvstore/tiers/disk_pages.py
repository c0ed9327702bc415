"""How a blob lies in LMDB.

    database ``index.1``    key               -> recency stamp, blob length, checksum of these three
    database ``pieces.1``   key, piece number -> 128 KB of the blob, the last piece shorter

**Pieces**, because LMDB needs consecutive free pages for a value: with whole blobs of mixed sizes
the file grew to 1.2 times its live bytes under steady eviction, with pieces of one size to 1.08,
and pieces are also read faster (measured, 512 MB, blobs of 2 KB to 3 MB).

**Every piece owns two pages or more.** LMDB keeps values below half a page inside the pages of its
tree, which it copies on every write, leaving old copies behind; and it recycles the buffers of
*single* pages uncleared, so that remains of a one-page value turn up in the gaps of later pages.
Short pieces are padded past both limits: a blob's bytes exist exactly once in the file, sizes are
exact, and ``erase`` finds all of them.

**Erasing.** LMDB never overwrites: deleting only puts pages on a free list, and they keep their
content until reused. Cold KV can be turned back into the prompt it came from, so ``forget`` must do
better. ``erase`` writes zeros over the pieces where they lie in the file. LMDB does not tell where
that is, but each run of value pages begins with a 16-byte header holding its page number; the
bytes found there in the file must have the value's checksum before anything is overwritten. A blob
erased but not yet deleted (a kill in between) fails its checksum and is a miss. What this cannot
reach: old copies inside an SSD or a copy-on-write file system, and free pages with blobs that were
evicted, or whose commit was cut short by a kill, until LMDB uses those pages again.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import google_crc32c
import lmdb
import numpy as np

DATABASES = (b"index.1", b"pieces.1")  # 1 is the version of this layout
PIECE_BYTES = 128 << 10  # of file, header included
HEADER_BYTES = 16  # LMDB 0.9 data format on 64-bit machines, before a value in its own pages
# Keys, node headers and the tree's fill grade of about two thirds, per piece and index entry.
NODE_BYTES = 128

_ENTRY = struct.Struct("<QQ")  # stamp, blob length
_CHECKSUM = struct.Struct("<I")  # crc32c of key and entry
_PIECE_NUMBER = struct.Struct(">H")  # big-endian: pieces of a blob are neighbours in the tree
_PAGE_NUMBER = struct.Struct("=Q")
_NO_KEY = b"\0"  # the store's keys are longer


class Stored(NamedTuple):
    stamp: int
    length: int


class Place(NamedTuple):
    """One piece in the file."""

    offset: int
    nbytes: int
    crc: int  # crc32c of what should be found there


class Pages:
    """Reads and writes blobs inside transactions that the caller opens.

    Args:
        env: opened with room for two databases. Not closed here.
    """

    def __init__(self, env: lmdb.Environment) -> None:
        self._index, self._pieces = (env.open_db(name) for name in DATABASES)
        self.page_bytes: int = env.stat()["psize"]
        self.piece_payload = PIECE_BYTES - HEADER_BYTES

    def nbytes(self, length: int) -> int:
        """Bytes of file that a blob of ``length`` bytes takes, tree nodes included."""
        whole, rest = divmod(length, self.piece_payload)
        total = whole * PIECE_BYTES + NODE_BYTES * (whole + 2)
        if rest or not whole:
            total += -(-(self._padded(rest) + HEADER_BYTES) // self.page_bytes) * self.page_bytes
        return total

    def _padded(self, length: int) -> int:
        return max(length, self.page_bytes)

    def _num_pieces(self, length: int) -> int:
        return max(1, -(-length // self.piece_payload))

    def stored(self, txn: lmdb.Transaction[memoryview], key: bytes) -> Stored | None:
        """
        Raises:
            lmdb.CorruptedError: the entry is damaged.
        """
        packed = txn.get(key, db=self._index)
        return None if packed is None else _unpack(key, bytes(packed))

    def everything(self, txn: lmdb.Transaction[memoryview]) -> list[tuple[bytes, Stored]]:
        """All blobs, without reading them.

        Raises:
            lmdb.CorruptedError: an entry is damaged, or the two databases do not fit together.
        """
        entries = txn.cursor(db=self._index).iternext()
        found = [(bytes(key), _unpack(bytes(key), bytes(packed))) for key, packed in entries]
        names = txn.cursor(db=self._pieces).iternext(keys=True, values=False)
        expected = {
            key + _PIECE_NUMBER.pack(i)
            for key, stored in found
            for i in range(self._num_pieces(stored.length))
        }
        if set(map(bytes, names)) != expected:
            raise lmdb.CorruptedError("pieces without an entry, or an entry without pieces")
        return found

    def read(self, txn: lmdb.Transaction[memoryview], key: bytes) -> bytes | None:
        """The blob in one copy out of the map, or None.

        Raises:
            lmdb.CorruptedError: there is an entry, but it or a piece is damaged.
        """
        stored = self.stored(txn, key)
        if stored is None:
            return None
        blob = b"".join(self._views(txn, key, stored.length))
        if len(blob) != stored.length:
            raise lmdb.CorruptedError("a piece is missing or short")
        return blob

    def write(
        self, txn: lmdb.Transaction[memoryview], key: bytes, blob: memoryview, stamp: int
    ) -> None:
        """Store a blob whose key is absent; ``blob`` is bytes, contiguous."""
        step = self.piece_payload
        for number in range(self._num_pieces(len(blob))):
            piece = blob[number * step : (number + 1) * step]
            padding = self._padded(len(piece)) - len(piece)
            value = bytes(piece) + bytes(padding) if padding else piece
            txn.put(key + _PIECE_NUMBER.pack(number), value, db=self._pieces)
        txn.put(key, _pack(key, Stored(stamp, len(blob))), db=self._index)

    def restamp(self, txn: lmdb.Transaction[memoryview], key: bytes, stamp: int) -> None:
        stored = self.stored(txn, key)
        if stored is not None:
            txn.put(key, _pack(key, Stored(stamp, stored.length)), db=self._index)

    def delete(self, txn: lmdb.Transaction[memoryview], key: bytes) -> bool:
        stored = self.stored(txn, key)
        if stored is None:
            return False
        for number in range(self._num_pieces(stored.length)):
            txn.delete(key + _PIECE_NUMBER.pack(number), db=self._pieces)
        txn.delete(key, db=self._index)
        return True

    def turn(self, txn: lmdb.Transaction[memoryview]) -> None:
        """Change nothing, but make the commit a real one: pages freed earlier come into use."""
        txn.put(_NO_KEY, b"", db=self._index)
        txn.delete(_NO_KEY, db=self._index)

    def places(self, txn: lmdb.Transaction[memoryview], key: bytes) -> list[Place]:
        """Where a blob's pieces lie; true until the second commit after the one that deletes it."""
        stored = self.stored(txn, key)
        views = self._views(txn, key, stored.length) if stored is not None else ()
        return [self._place(view) for view in views if view]

    def _place(self, view: memoryview) -> Place:
        address = np.frombuffer(view, np.uint8).ctypes.data
        (page,) = _PAGE_NUMBER.unpack(ctypes.string_at(address - HEADER_BYTES, _PAGE_NUMBER.size))
        offset = page * self.page_bytes + HEADER_BYTES
        return Place(offset, len(view), google_crc32c.value(bytes(view)))

    def _views(
        self, txn: lmdb.Transaction[memoryview], key: bytes, length: int
    ) -> Iterator[memoryview]:
        """The pieces as views into the map, cut to the blob's length; valid inside ``txn``."""
        for number in range(self._num_pieces(length)):
            view = txn.get(key + _PIECE_NUMBER.pack(number), db=self._pieces)
            if view is not None:
                yield view[: min(self.piece_payload, length - number * self.piece_payload)]


def erase(place: Place, data_fd: int) -> bool:
    """Overwrite a piece with zeros in the file; True if it was found there and every byte is gone.

    The caller is the only writer, so the page cannot get a new owner meanwhile.
    """
    if place.offset >= 1 << 63:
        return False
    there = os.pread(data_fd, place.nbytes, place.offset)
    if len(there) != place.nbytes or google_crc32c.value(there) != place.crc:
        return False
    return os.pwrite(data_fd, bytes(place.nbytes), place.offset) == place.nbytes


def _pack(key: bytes, stored: Stored) -> bytes:
    entry = _ENTRY.pack(*stored)
    return entry + _CHECKSUM.pack(google_crc32c.value(key + entry))


def _unpack(key: bytes, packed: bytes) -> Stored:
    entry = packed[: _ENTRY.size]
    if packed[_ENTRY.size :] != _CHECKSUM.pack(google_crc32c.value(key + entry)):
        raise lmdb.CorruptedError("an index entry is damaged")
    return Stored(*_ENTRY.unpack(entry))
