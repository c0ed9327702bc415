"""The book of one writer: what it has on the server, written down on the server itself.

    thermocline.book:<writer>      a hash: <key><generation> -> its manifest, and when it was used

An engine that is killed leaves blobs behind. Its next life reads the book, so that one budget
holds for all of them; and no engine counts or evicts what another one wrote. An entry is written
before its blob is visible and struck after the blob is gone, so the book may list too much, never
too little. The server may evict the whole book, and then has a ``maxmemory`` that bounds the rest.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvstore.errors import Corrupt, TierUnavailable
from kvstore.tiers.redis_server.fragments import MANIFEST_BYTES, BlobManifest, parse_manifest
from kvstore.tiers.redis_server.link import Command, RedisLink

ENTRY_BYTES: Final = 150  # of the server's memory, about; measured 140 for names of 37 bytes

_SCAN_COUNT: Final = 500
_MAX_PAGES: Final = 4000  # a bound on the work, two million blobs
_GENERATION: Final = struct.Struct(">Q")
_STAMP: Final = struct.Struct("<Q")


class BookEntry(NamedTuple):
    """One blob as it was written once, perhaps in an earlier life."""

    key: bytes
    manifest: BlobManifest
    stamp: int  # grows with every use


class Book:
    """Makes the commands that keep a writer's book. Thread-safe.

    Args:
        clock: seconds of the wall clock: what orders the uses of several lives.
    """

    def __init__(
        self, link: RedisLink, writer: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._link = link
        self._name = b"thermocline.book:%s" % writer.encode("ascii")
        self._clock = clock
        self._lock = threading.Lock()
        self._last_stamp = 0
        self._owed: list[bytes] = []  # entries of blobs that were found to be gone

    def enter(self, manifests: Mapping[bytes, BlobManifest]) -> list[Command]:
        """List blobs as used just now, the last one most recently."""
        listed: list[bytes] = []
        for key, manifest in manifests.items():
            listed += [_field(key, manifest), manifest.pack() + _STAMP.pack(self._next_stamp())]
        return [("HSET", self._name, *listed)] if listed else []

    def strike(self, manifests: Mapping[bytes, BlobManifest]) -> list[Command]:
        """List these blobs no more, nor those that were ``owe``d."""
        fields = [_field(key, manifest) for key, manifest in manifests.items()]
        with self._lock:
            fields += self._owed
            self._owed = []
        return [("HDEL", self._name, *fields)] if fields else []

    def owe(self, manifests: Mapping[bytes, BlobManifest]) -> None:
        """Strike these along with the next ones: nobody waits for the server here."""
        with self._lock:
            self._owed += [_field(key, manifest) for key, manifest in manifests.items()]

    def entries(self) -> Iterator[BookEntry]:
        """Read the book, as the server lists it.

        Raises:
            TierUnavailable: it did not answer, or does not have such a command.
        """
        cursor = b"0"
        for _ in range(_MAX_PAGES):
            (reply,) = self._link.run([("HSCAN", self._name, cursor, "COUNT", _SCAN_COUNT)])
            if isinstance(reply, Exception):
                self._link.count(str(reply))
                raise TierUnavailable(f"redis tier: {reply}")
            cursor, listed = reply
            yield from _parsed(zip(listed[::2], listed[1::2], strict=True))
            if cursor == b"0":
                return

    def _next_stamp(self) -> int:
        with self._lock:
            self._last_stamp = max(self._last_stamp + 1, round(self._clock() * 1e6))
            return self._last_stamp


def _field(key: bytes, manifest: BlobManifest) -> bytes:
    return key + _GENERATION.pack(manifest.generation)


def _parsed(listed: Iterable[tuple[bytes, bytes]]) -> Iterator[BookEntry]:
    """Yield the entries that can be read; others are left alone."""
    for field, value in listed:
        try:
            manifest = parse_manifest(value[:MANIFEST_BYTES])
            (stamp,) = _STAMP.unpack(value[MANIFEST_BYTES:])
        except (Corrupt, struct.error):
            continue
        if field.endswith(_GENERATION.pack(manifest.generation)):
            yield BookEntry(field[: -_GENERATION.size], manifest, stamp)
