"""The book of one writer: the list of its blobs on the server, stored on the server itself.

    thermocline.book:<writer>      a hash: <key><generation> -> its manifest, and when it was used

An engine that is killed leaves its blobs there. Its next life reads the book, so that one budget
holds for all of them; and no engine counts or evicts another engine's blobs. An entry is written
before its blob is visible and struck after the blob is gone, so the book may list too much, never
too little: if the server evicted a manifest, the fragments are removed as well. The server may
evict the whole book; it then has a ``maxmemory`` that bounds the rest. With a time to live the book
expires, after twice that time without a write or a touch.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from kvstore.errors import Corrupt, TierUnavailable
from kvstore.tiers.redis_server.fragments import MANIFEST_BYTES, BlobManifest, parse_manifest
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.redis_server.servers import Command

ENTRY_BYTES: Final = 150  # of the server's memory, estimated; measured 140 for names of 37 bytes

_SCAN_COUNT: Final = 500
_MAX_PAGES: Final = 4000  # a bound on the work, two million blobs
_GENERATION: Final = struct.Struct(">Q")
_STAMP: Final = struct.Struct("<Q")


# One write of a blob: its key and its manifest.
Written: TypeAlias = tuple[bytes, BlobManifest]


class BookEntry(NamedTuple):
    """One blob as it was written once, perhaps in an earlier life."""

    key: bytes
    manifest: BlobManifest
    stamp: int  # grows with every use


class Book:
    """Makes the commands that keep a writer's book. Thread-safe.

    Args:
        ttl_ms: the blobs expire this long after they were written or touched; 0 = never.
        clock: seconds of the wall clock, which orders the uses of several lives.
    """

    def __init__(
        self,
        link: RedisLink,
        writer: str,
        ttl_ms: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._ttl_ms = ttl_ms
        self._name = b"thermocline.book:%s" % writer.encode("ascii")
        self._clock = clock
        self._lock = threading.Lock()
        self._last_stamp = 0
        self._owed: list[Written] = []  # blobs that were found to be gone, still to be struck

    def enter(self, manifests: Mapping[bytes, BlobManifest]) -> list[Command]:
        """Make the commands that list blobs as used just now, the last one most recently."""
        listed: list[bytes] = []
        for key, manifest in manifests.items():
            listed += [_field(key, manifest), manifest.pack() + _STAMP.pack(self._next_stamp())]
        if not listed:
            return []
        # The book outlives its blobs. PERSIST without expiry: an earlier life may have set one.
        kept: Command = ("PEXPIRE", self._name, 2 * self._ttl_ms)
        return [("HSET", self._name, *listed), kept if self._ttl_ms else ("PERSIST", self._name)]

    def strike(self, written: Iterable[Written]) -> list[Command]:
        """Make the commands that remove these blobs from the book."""
        fields = [_field(key, manifest) for key, manifest in written]
        return [("HDEL", self._name, *fields)] if fields else []

    def owe(self, written: Iterable[Written]) -> None:
        """Keep these to be struck along with the next ones, without waiting for the server."""
        with self._lock:
            self._owed += written

    def take_owed(self) -> list[Written]:
        """Return the owed blobs, and forget them."""
        with self._lock:
            owed, self._owed = self._owed, []
        return owed

    def pages(self) -> Iterator[list[BookEntry]]:
        """Read the book page by page, as the server lists it.

        Raises:
            TierUnavailable: it did not answer, or lacks the command.
        """
        cursor = b"0"
        for _ in range(_MAX_PAGES):
            (reply,) = self._link.run([("HSCAN", self._name, cursor, "COUNT", _SCAN_COUNT)])
            if isinstance(reply, Exception):
                self._link.count(str(reply))
                raise TierUnavailable(f"redis tier: {reply}")
            cursor, listed = reply
            yield list(_parsed(zip(listed[::2], listed[1::2], strict=True)))
            if cursor == b"0":
                return

    def _next_stamp(self) -> int:
        with self._lock:
            self._last_stamp = max(self._last_stamp + 1, round(self._clock() * 1e6))
            return self._last_stamp


def _field(key: bytes, manifest: BlobManifest) -> bytes:
    return key + _GENERATION.pack(manifest.generation)


def _parsed(listed: Iterable[tuple[bytes, bytes]]) -> Iterator[BookEntry]:
    """Yield the entries that can be read; others are ignored."""
    for field, value in listed:
        try:
            manifest = parse_manifest(value[:MANIFEST_BYTES])
            (stamp,) = _STAMP.unpack(value[MANIFEST_BYTES:])
        except (Corrupt, struct.error):
            continue
        if field.endswith(_GENERATION.pack(manifest.generation)):
            yield BookEntry(field[: -_GENERATION.size], manifest, stamp)
