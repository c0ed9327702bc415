"""The Redis tier: blobs on a Redis or Valkey server that several engines may share.

    thermocline:blob:<key>     the blob

``<key>`` is the blob's key in hex. What a value holds is verified by its seal and by the blob's own
name and checksum, as in every tier. **The server decides which blobs exist.** It may evict any
value, restart empty or be gone: ``contains_many`` asks it. It also bounds them: by its own
``maxmemory`` and policy (``client``), and since every value has a time to live, which a use
prolongs. Neither pins nor tenants' limits hold there, since the server knows neither.

A write that the server refuses (out of memory and not allowed to evict, a read-only replica, an
access rule) concerns its own blob only and is counted as an error. A refused read or removal (part
of a cluster is down, an access rule) raises: the blob may be there, or stay there.

Each exchange with the server has ``deadline_s``; ``get_many`` has one such deadline for the whole
call and returns the blobs that came in time. After three failures in a row every call raises
``TierUnavailable`` at once, until a probe succeeds (``breaker``).
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
BATCH_BYTES: Final = 4 << 20  # of blobs that are sent or awaited together, at most
BATCH_KEYS: Final = 256
# Assumed until the first blobs have come: their size, and the speed of the line.
FIRST_BLOB_BYTES: Final = 512 << 10
FIRST_BYTES_S: Final = 4 << 20
MAX_BLOB_BYTES: Final = 512 << 20  # the most that a server takes
PROLONG_S: Final = 600.0  # a blob that is used more often is prolonged once in this time
MAX_PROLONGED: Final = 65_536  # that are remembered; others are prolonged once too often
WATCH_S: Final = 5.0  # between looks at the server
SCAN_COUNT: Final = 1000

_log = logging.getLogger(__name__)


class RedisTier:
    """Implements ``base.Tier`` on the server at ``url``, to which the first use connects.

    Args:
        url: see ``client``.
        deadline_s: for one exchange with the server.
        ttl_s: blobs expire this long after they were written or used.
        folder: of this engine alone, for deletions that wait; None: they end with this object.

    Raises:
        ValueError: not a URL.
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
        self._lock = threading.Lock()  # the fields below; not held during calls to the server
        self._prolonged: dict[bytes, float] = {}  # when, by key; the longest ago first
        self._bounds: ServerBounds | None = None  # not known yet
        self._watching: Periodic | None = None
        self._blob_bytes: float = FIRST_BLOB_BYTES  # of the largest that came lately
        self._bytes_s: float = FIRST_BYTES_S
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
        """Read some blobs in one exchange."""
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
        """Return how many bytes to send or await at once: a part of the deadline's worth."""
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
            self.touch([key for key, reply in held if reply is None])  # they were there
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
        """Yield blobs in order, one or as many as there is room for; count too large ones."""
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
        """Restart the clocks of a chain, the first one last, so that it is the most recent.

        Those that were prolonged lately are left out: a turn of a long session costs what is new.
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
        """Look at the server now and every few seconds, on a thread of its own. Call once."""
        self._watching = Periodic(self.greet, WATCH_S, "kvstore-redis-watch", at_once=True)

    def greet(self) -> None:
        """Ask the server how it bounds its memory; say in the log if it does not."""
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
        """Return the server's own numbers as of the last look, with all that others keep there."""
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
        """Do nothing: a writing call returns only when the server has the blob."""

    def close(self) -> None:
        self._link.close()
        if self._watching is not None:
            self._watching.close()

    # Replies

    def _in_batches(self, commands: Sequence[Command]) -> list[Reply]:
        """Run small commands, each batch within a deadline of its own."""
        size = 2 * BATCH_KEYS
        batches = (commands[i : i + size] for i in range(0, len(commands), size))
        return [reply for batch in batches for reply in self._link.run(batch)]

    def _is_refusal(self, reply: Reply) -> bool:
        if isinstance(reply, Exception):
            self._link.count(str(reply))
            return True
        return False

    def _answer(self, reply: Reply) -> Reply:
        """Return a reply that is no refusal; else count it, and raise ``TierUnavailable``."""
        if self._is_refusal(reply):
            raise TierUnavailable(f"redis tier: {reply}")
        return reply

    def _content(self, reply: Reply) -> bytes:
        """Return a value; empty if it is missing, or of a type that no blob has."""
        if reply is None or _is_of_another_type(reply):
            return b""
        return bytes(self._answer(reply))


def _is_of_another_type(reply: Reply) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE")


def name_of(key: bytes) -> bytes:
    return PREFIX + key.hex().encode()


def _key(name: bytes) -> bytes | None:
    """Return the key of a value's name; None if another program named it."""
    try:
        return bytes.fromhex(name[len(PREFIX) :].decode("ascii"))
    except ValueError:
        return None
