"""The Redis tier: blobs on a Redis or Valkey server that several engines may share.

    thermocline:blob:<key>     the blob

``<key>`` is the blob's key in hex. A value is verified by its seal and by the blob's own key and
checksum, as in every tier. **The server decides which blobs exist.** It may evict any value,
restart empty or be gone, so ``contains_many`` asks it each time. The server also bounds its memory,
by ``maxmemory`` and its policy (``client``). Every value has a time to live, which each use renews.
Pins and tenants' limits have no effect, since the server knows neither.

A write that the server refuses (no memory and no eviction allowed, a read-only replica, an access
rule) affects only its own blob and is counted as an error. A refused read or deletion (part of a
cluster is down, an access rule) raises, since the blob may exist.

Each exchange with the server must end within ``deadline_s``; ``get_many`` has one such deadline for
the whole call and returns the blobs that came in time. After three failures in a row every call
raises ``TierUnavailable`` at once, until a probe succeeds (``link.Breaker``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.errors import TierUnavailable
from kvstore.session import TenantLimits, TierName
from kvstore.tiers.base import Blob, EvictionCause, TierStats
from kvstore.tiers.redis_server.client import ServerBounds, read_bounds
from kvstore.tiers.redis_server.link import Command, RedisLink, Reply
from kvstore.workers import Periodic

PREFIX: Final = b"thermocline:blob:"
TTL_S: Final = 7 * 86400.0
OWED_FILE: Final = "redis-deletions"  # in the engine's folder
BATCH_BYTES: Final = 4 << 20  # the most bytes of blobs in one exchange
BATCH_KEYS: Final = 256
# Assumed until the first blobs have come: bytes of a blob, and bytes per second.
FIRST_BLOB_BYTES: Final = 512 << 10
FIRST_BYTES_S: Final = 4 << 20
MAX_BLOB_BYTES: Final = 512 << 20  # the longest value of a Redis server
PROLONG_S: Final = 600.0  # the time to live of a blob is renewed at most once in this time
MAX_PROLONGED: Final = 65_536  # keys whose renewal is remembered; others may be renewed more often
WATCH_S: Final = 5.0  # between readings of the server's bounds
SCAN_COUNT: Final = 1000

_log = logging.getLogger(__name__)


class RedisTier:
    """Implements ``base.Tier`` on the server at ``url``, and connects at the first use.

    Args:
        url: see ``client``.
        deadline_s: the time for one exchange with the server.
        ttl_s: blobs expire this long after they were written or used.
        folder: a folder of this engine alone, for the file of pending deletions; None = they are
            lost with this object.

    Raises:
        ValueError: ``url`` is not valid.
    """

    name: TierName = "redis"

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        ttl_s: float = TTL_S,
        folder: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = RedisLink(url, deadline_s, monotonic)
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._prolong_s = min(PROLONG_S, ttl_s / 8)
        self._monotonic = monotonic
        self._lock = threading.Lock()  # for the fields below; not held during calls to the server
        self._prolonged: dict[bytes, float] = {}  # by key: time of the last renewal, oldest first
        self._bounds: ServerBounds | None = None  # None: not read yet
        self._watching: Periodic | None = None
        self._blob_bytes: float = FIRST_BLOB_BYTES  # the largest blob of recent exchanges
        self._bytes_s: float = FIRST_BYTES_S  # speed of the last exchange
        self.owed_file = None if folder is None else folder / OWED_FILE

    def __repr__(self) -> str:
        return f"RedisTier({self._link.name})"

    # Reading

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        found: dict[bytes, Blob] = {}
        refusals: list[TierUnavailable] = []
        until = self._link.deadline()
        first = 0
        try:
            while first < len(keys):
                end = first + max(1, min(BATCH_KEYS, int(self._room() / self._blob_bytes)))
                self._read(keys[first:end], until, found, refusals)
                first = end
        except TierUnavailable:
            if not found:
                raise
        if refusals and not found:
            raise refusals[-1]
        return [found.get(key) for key in keys]

    def _read(
        self,
        keys: Sequence[bytes],
        until: float,
        found: dict[bytes, Blob],
        refusals: list[TierUnavailable],
    ) -> None:
        """Read blobs in one exchange into ``found``; add the errors of refused ones."""
        began = self._monotonic()
        replies = self._link.run([("GET", name_of(key)) for key in keys], until)
        self._note_speed([len(x) for x in replies if isinstance(x, bytes)], began)
        for key, reply in zip(keys, replies, strict=True):
            try:
                if value := self._content(reply):
                    found[key] = value
            except TierUnavailable as error:
                refusals.append(error)

    def _room(self) -> float:
        """Return how many bytes of blobs one exchange may have: a quarter of the deadline."""
        return min(BATCH_BYTES, self._bytes_s * self._link.deadline_s / 4)

    def _note_speed(self, lengths: Sequence[int], began: float) -> None:
        if lengths:
            self._blob_bytes = max(1, *lengths, 0.8 * self._blob_bytes)
            self._bytes_s = max(1, sum(lengths)) / max(self._monotonic() - began, 1e-6)

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        replies = self._in_batches([("EXISTS", name_of(key)) for key in keys])
        refused = [self._is_refusal(x) for x in replies]
        if replies and all(refused):
            raise TierUnavailable(f"redis tier: {replies[0]}")
        return [x == 1 for x in replies]

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        found: list[int | None] = []
        for reply in self._in_batches([("STRLEN", name_of(key)) for key in keys]):
            length = 0 if _is_of_another_type(reply) else self._answer(reply)
            found.append(length or None)
        return found

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        pattern = name_of(prefix) + b"*"
        names = self._link.call(lambda x: list(x.scan_iter(match=pattern, count=SCAN_COUNT)))
        keys = sorted({key for key in map(_key, names) if key is not None})
        for first in range(0, len(keys), BATCH_KEYS):
            batch = keys[first : first + BATCH_KEYS]
            found = zip(batch, self.get_many(batch), strict=True)
            yield from ((key, blob) for key, blob in found if blob is not None)

    # Writing

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        num_held = 0
        for batch in self._batches(dict(items)):
            began = self._monotonic()
            try:
                replies = self._link.run([(*self._set(*x), "NX") for x in batch])
            except TierUnavailable:
                if not num_held:
                    raise
                break
            self._note_speed([len(blob) for _, blob in batch], began)
            held = [
                (key, reply)
                for (key, _), reply in zip(batch, replies, strict=True)
                if not self._is_refusal(reply)
            ]
            self._note_prolonged([key for key, reply in held if reply is not None])
            self.touch([key for key, reply in held if reply is None])  # NX: they existed
            num_held += len(held)
        return num_held

    def replace(self, key: bytes, blob: Blob, owner: str = "", after: bytes = b"") -> bool:
        for batch in self._batches({key: blob}):
            (reply,) = self._link.run([self._set(*x) for x in batch])
            if self._is_refusal(reply):
                return False
            self._note_prolonged([key])
            return True
        return False

    def _set(self, key: bytes, blob: Blob) -> Command:
        return ("SET", name_of(key), bytes(blob), "PX", self._ttl_ms)

    def _batches(self, blobs: Mapping[bytes, Blob]) -> Iterator[list[tuple[bytes, Blob]]]:
        """Yield blobs in order, in batches of at least one; a blob over the maximum is an error."""
        batch: list[tuple[bytes, Blob]] = []
        total = 0
        for key, blob in blobs.items():
            if len(blob) > MAX_BLOB_BYTES:
                self._link.count(f"a blob of {len(blob)} bytes is too large")
                continue
            if batch and (total + len(blob) > self._room() or len(batch) >= BATCH_KEYS):
                yield batch
                batch, total = [], 0
            batch.append((key, blob))
            total += len(blob)
        if batch:
            yield batch

    def delete_many(self, keys: Iterable[bytes]) -> int:
        keys = list(dict.fromkeys(keys))
        with self._lock:
            for key in keys:
                self._prolonged.pop(key, None)
        replies = self._in_batches([("DEL", name_of(key)) for key in keys])
        return sum(self._answer(x) for x in replies)

    # Recency

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        """Renew the time to live of a chain, its first key last, so that it is the most recent.

        Keys that were renewed lately are left out, so that a turn costs only its new chunks.
        """
        now = self._monotonic()
        with self._lock:
            due = [
                x for x in keys if now - self._prolonged.get(x, float("-inf")) >= self._prolong_s
            ]
        if not due:
            return
        with contextlib.suppress(TierUnavailable):
            self._in_batches([("PEXPIRE", name_of(x), self._ttl_ms) for x in reversed(due)])
            self._note_prolonged(due)

    def _note_prolonged(self, keys: Iterable[bytes]) -> None:
        now = self._monotonic()
        with self._lock:
            for key in keys:
                self._prolonged.pop(key, None)
                self._prolonged[key] = now
            while len(self._prolonged) > MAX_PROLONGED:
                del self._prolonged[next(iter(self._prolonged))]

    def own(self, owner: str, keys: Sequence[bytes]) -> None:
        """Do nothing: the server does not know tenants."""

    def limit_tenants(self, limits: TenantLimits) -> dict[str, int] | None:
        """Return None: what a tenant holds on the server is not known."""
        return None

    def pin(self, key: bytes, pinned: bool) -> None:
        """Do nothing: the server does not know pins."""

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        return [None] * len(keys)

    # Life

    def watch(self) -> None:
        """Read the server's bounds now and every few seconds, on another thread. Call once."""
        self._watching = Periodic(self.greet, WATCH_S, "kvstore-redis-watch", at_once=True)

    def greet(self) -> None:
        """Read how the server bounds its memory, and log a warning if it does not."""
        before = self.stats().trouble
        try:
            bounds = self._link.call(read_bounds)
        except TierUnavailable:  # the link has counted and logged it
            if not self._link.available:
                return
            bounds = ServerBounds()  # it refuses INFO
        with self._lock:
            self._bounds = bounds
        if bounds.trouble and bounds.trouble != before:
            _log.warning("redis tier %s: %s", self._link.name, bounds.trouble)

    def stats(self) -> TierStats:
        """Return the server's numbers as last read, which count the data of all its clients."""
        with self._lock:
            bounds = self._bounds or ServerBounds()
            trouble = self._bounds.trouble if self._bounds else ""
        return TierStats(
            name=self.name,
            nbytes=bounds.used_bytes,
            capacity_bytes=bounds.max_bytes or 0,
            num_blobs=bounds.num_keys,
            evictions=bounds.evictions,
            errors=self._link.num_errors,
            available=self._link.available,
            trouble=trouble,
        )

    def flush(self) -> None:
        """Do nothing, since a write returns only when the server has the blob."""

    def close(self) -> None:
        self._link.close()
        if self._watching is not None:
            self._watching.close()

    # Replies

    def _in_batches(self, commands: Sequence[Command]) -> list[Reply]:
        """Run commands that carry no blobs; return their replies. Each batch has its deadline."""
        size = 2 * BATCH_KEYS
        batches = (commands[i : i + size] for i in range(0, len(commands), size))
        return [reply for batch in batches for reply in self._link.run(batch)]

    def _is_refusal(self, reply: Reply) -> bool:
        """Return whether the server refused the command, and count that as an error."""
        if isinstance(reply, Exception):
            self._link.count(str(reply))
            return True
        return False

    def _answer(self, reply: Reply) -> Reply:
        """Return the reply; raise ``TierUnavailable``, and count it, if it is a refusal."""
        if self._is_refusal(reply):
            raise TierUnavailable(f"redis tier: {reply}")
        return reply

    def _content(self, reply: Reply) -> bytes:
        """Return the blob in a reply; b"" if there is none, or a value of another Redis type."""
        if reply is None or _is_of_another_type(reply):
            return b""
        return bytes(self._answer(reply))


def _is_of_another_type(reply: Reply) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE")


def name_of(key: bytes) -> bytes:
    return PREFIX + key.hex().encode()


def _key(name: bytes) -> bytes | None:
    """Return the blob's key in the name of a Redis value; None if it is no such name."""
    try:
        return bytes.fromhex(name[len(PREFIX) :].decode("ascii"))
    except ValueError:
        return None
