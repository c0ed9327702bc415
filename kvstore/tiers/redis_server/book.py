"""The book of one writer: its name, the list of its blobs on the server, and earlier lives' blobs.

The name is stored in the engine's own folder, in a file that is held with flock while the engine
lives: no other engine can use that name meanwhile, and the kernel releases it with the process. If
the file is held or cannot be written, the name is a new one: then the blobs of this life are
unknown to the next.

    thermocline.book:<writer>      a hash: <key><generation> -> its manifest, and when it was used

An engine that is killed leaves its blobs there. Its next life reads the book, so that one budget
holds for all of them; and no engine counts or evicts another engine's blobs. An entry is written
before its blob is visible and struck after the blob is gone, so the book may list too much, never
too little: if the server evicted a manifest, the fragments are removed as well. The server may
evict the whole book; it then has a ``maxmemory`` that bounds the rest. With a time to live the book
expires, after twice that time without a write or a touch.

Blobs of earlier lives are added on a thread while the tier serves, but only once the pins of their
sessions are known: the oldest are evicted as they are added. A server that is down is tried again
until it has answered once; a server that came back empty has an empty book.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from kvstore.errors import Corrupt, TierUnavailable
from kvstore.tiers.redis_server.fragments import MANIFEST_BYTES, BlobManifest, parse_manifest
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.redis_server.servers import Command

FILE_NAME: Final = "redis-writer"

_NAME_BYTES: Final = 16
_NAME: Final = re.compile(rb"[0-9a-f]{%d}" % _NAME_BYTES)
_log = logging.getLogger(__name__)
ENTRY_BYTES: Final = 150  # of the server's memory, estimated; measured 140 for names of 37 bytes
_SCAN_COUNT: Final = 500
_MAX_PAGES: Final = 4000  # a bound on the work, two million blobs
_GENERATION: Final = struct.Struct(">Q")
_STAMP: Final = struct.Struct("<Q")
# One write of a blob: its key and its manifest.
Written: TypeAlias = tuple[bytes, BlobManifest]
BATCH: Final = 256  # or a few more; the tier's writers wait for one batch at most
FIRST_WAIT_S: Final = 2.0
LONGEST_WAIT_S: Final = 60.0
PINS_S: Final = 60.0  # without pins for so long, blobs of earlier lives are added nevertheless


class WriterName:
    """A name that no other engine has until ``release``."""

    def __init__(self, folder: Path, file_name: str = FILE_NAME) -> None:
        self._fd = -1
        self.folder: Path | None = folder  # of this engine alone; None if it cannot be used
        self.text = secrets.token_hex(_NAME_BYTES // 2)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = _held(folder / file_name)
            self.text = _kept(self._fd, self.text)
        except OSError as error:
            self.release()
            self.folder = None
            _log.warning(
                "what this life leaves in redis will not be known to the next: "
                "%s cannot be used: %s",
                folder / file_name,
                error.strerror or error,
            )

    def release(self) -> None:
        """Let another engine use this name. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _held(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _kept(fd: int, new: str) -> str:
    """Return the name in the file; write ``new`` if there is none."""
    found = os.pread(fd, _NAME_BYTES + 1, 0)
    if _NAME.fullmatch(found):
        return found.decode("ascii")
    os.ftruncate(fd, 0)
    os.pwrite(fd, new.encode("ascii"), 0)
    return new


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


def last_writes(
    entries: Iterable[BookEntry],
    exist: Callable[[Sequence[bytes]], Sequence[bool | None]],
    manifests: Callable[[Sequence[bytes]], Mapping[bytes, BlobManifest]],
) -> dict[bytes, BlobManifest]:
    """Return the last manifests of these entries' keys, as far as their blobs exist.

    The stamps do not show which is the last: a ``touch`` may have been late. For a key with one
    entry and fragments it is enough to check that it exists, which does not make it recent for the
    server. Small blobs, such as the records of sessions, are compared: another engine may have
    continued the session.

    Args:
        exist, manifests: ask the server about keys.
    """
    listed: dict[bytes, list[BlobManifest]] = {}
    for key, manifest, _ in entries:
        listed.setdefault(key, []).append(manifest)
    single = [key for key, writes in listed.items() if len(writes) == 1 and writes[0].num_fragments]
    checked = set(single)
    there = zip(single, exist(single), strict=True)
    seen = {key: listed[key][0] for key, yes in there if yes}
    others = manifests([key for key in listed if key not in checked])
    # A blob of another engine counts in that engine's budget.
    return seen | {key: x for key, x in others.items() if x in listed[key]}


class EarlierLives:
    """Reads a book once, and passes its entries on in batches, the most recently used first.

    Args:
        enter: takes a batch. All writes of one key are in the same batch.
        on_end: called once, when no more batches follow.
    """

    def __init__(
        self,
        book: Book,
        enter: Callable[[Sequence[BookEntry]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._book = book
        self._enter = enter
        self._on_end = on_end
        self._listed: list[list[BookEntry]] | None = None  # by key; the last used key first
        self._closing = threading.Event()
        self._has_pins = threading.Event()
        self._pins_s = PINS_S
        self._thread = threading.Thread(target=self._run, name="kvstore-redis-book", daemon=True)

    def start(self, pins_s: float = PINS_S) -> None:
        """Begin; returns at once. Entries wait for ``pins_known``, ``pins_s`` at most."""
        self._pins_s = pins_s
        self._thread.start()

    def pins_known(self) -> None:
        """Let entries be passed on from now on."""
        self._has_pins.set()

    def listed(self, prefix: bytes) -> Iterator[list[BookEntry]] | None:
        """Return the entries of all keys with this prefix, in batches, as they are passed on.

        None before the book is read, and after all entries were passed on.
        """
        listed = self._listed
        if listed is None:
            return None
        return _batches(x for x in listed if x[0].key.startswith(prefix))

    def close(self) -> None:
        """Stop; waits for a page of the book, or a call of ``enter``, that has begun."""
        self._closing.set()
        self._has_pins.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            num_found = self._read_when_there()
            if num_found:
                _log.info("redis: %d blobs of earlier lives count in the budget", num_found)
        except Exception:  # the outermost frame of this thread: the tier serves without it
            _log.exception("what earlier lives left in redis was not counted")
        finally:
            self._on_end()
            self._listed = None

    def _read_when_there(self) -> int:
        wait_s = FIRST_WAIT_S
        while not self._closing.is_set():
            try:
                return self._read()
            except TierUnavailable:
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return 0

    def _read(self) -> int:
        entries: dict[BookEntry, None] = {}  # a server may list an entry twice
        for page in self._book.pages():
            if self._closing.is_set():
                return 0
            entries |= dict.fromkeys(page)
        self._listed = listed = list(_by_last_use(entries))
        if not self._has_pins.wait(self._pins_s):
            _log.warning("redis: blobs of earlier lives are counted before their pins are known")
        for batch in _batches(listed):
            if self._closing.is_set():
                return 0
            self._enter(batch)
        return len(listed)


def _by_last_use(entries: Iterable[BookEntry]) -> Iterator[list[BookEntry]]:
    """Yield all entries of each key, the most recently used key first."""
    by_key: dict[bytes, list[BookEntry]] = {}
    for entry in sorted(entries, key=lambda x: x.stamp, reverse=True):
        by_key.setdefault(entry.key, []).append(entry)
    yield from by_key.values()


def _batches(keys: Iterable[list[BookEntry]]) -> Iterator[list[BookEntry]]:
    batch: list[BookEntry] = []
    for entries in keys:
        batch += entries
        if len(batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
