"""The sessions that a store knows, the blobs that they share, and claims on sessions.

The index keeps the records in memory, so that a turn need not read one. It lists the sessions and
counts how many of them need each blob. It may be out of date: only the tiers know whether a session
can be restored. At the start it is filled from the local tiers. A session that only a shared tier
has is found there when it returns. The index is bounded in bytes and drops the longest unused
sessions first.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec

from kvstore.blobs.chain import CHUNK, NAME_BYTES, RECORD, STATE, num_common_joined
from kvstore.errors import Corrupt, Mismatch, Unusable
from kvstore.ledger.notices import Restorable
from kvstore.ledger.record import PAGE_CHUNKS, Records, SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.session import MissReason, SessionRef
from kvstore.stats import Counters
from kvstore.tiers.base import Blob

ENTRY_BYTES: Final = 512  # Python's memory for each session besides its record
COUNTED_BYTES: Final = 104  # memory for a blob's number (see ``_number``) and its counter entry
MAX_GONE: Final = 8192  # sessions that are remembered as expired, or as too short


class Claims:
    """Locks of single sessions, by record key. Thread-safe; not reentrant.

    ``changed`` is notified whenever a claim ends. Threads may use it to wait for other things, too.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._claimed: set[bytes] = set()

    @contextmanager
    def claim(self, record_key: bytes) -> Iterator[None]:
        """Claim the session within the ``with`` block; wait until no other thread holds it."""
        with self.changed:
            self.changed.wait_for(lambda: record_key not in self._claimed)
            self._claimed.add(record_key)
        try:
            yield
        finally:
            self.release(record_key)

    def take(self, record_key: bytes) -> bool:
        """Claim the session without waiting; False if it is held. ``release`` ends the claim."""
        with self.changed:
            if record_key in self._claimed:
                return False
            self._claimed.add(record_key)
            return True

    def release(self, record_key: bytes) -> None:
        """End a claim."""
        with self.changed:
            self._claimed.discard(record_key)
            self.changed.notify_all()

    def is_claimed(self, record_key: bytes) -> bool:
        """Return whether a thread holds the session now."""
        with self.changed:
            return record_key in self._claimed


class _Entry(msgspec.Struct, frozen=True, gc=False):
    record: SessionRecord
    ends: tuple[bytes, bytes] | None  # first and last blob of ``Restorable``; None: it has neither
    nbytes: int


class SessionIndex:
    """Records by record key. Thread-safe; tiers are read without the lock held.

    Args:
        max_bytes: bound on memory; beyond it the longest unused sessions are dropped.
        ttl_s: how long an unused session is kept; 0 = forever.
    """

    def __init__(
        self,
        records: Records,
        stack: TierStack,
        counters: Counters,
        clock: Callable[[], float],
        *,
        max_bytes: int,
        ttl_s: float,
    ) -> None:
        self.records = records
        self._stack = stack
        self._counters = counters
        self.clock = clock
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        # By record key: when a session was forgotten whose record an unavailable tier may still
        # have. ``Deletions`` sets it.
        self.forgotten: dict[bytes, float] = {}
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # longest unused first
        self._why_gone: OrderedDict[bytes, MissReason] = OrderedDict()
        self._users: Counter[int] = Counter()  # number of sessions by blob, see ``_number``
        self._nbytes = 0
        self._num_removals = 0

    def __len__(self) -> int:
        return len(self._entries)

    # ---- known sessions

    def key_of(self, session: SessionRef) -> bytes:
        """Return the key of a session's record."""
        return self.records.key(session.tenant, session.id)

    def key(self, record: SessionRecord) -> bytes:
        """Return the key of a record."""
        return self.records.key(record.tenant, record.id)

    def blob_keys(self, record: SessionRecord) -> list[bytes]:
        """Return the keys of all blobs of the session, in the order of its tokens."""
        return self.records.blob_keys(record)

    def owned(self, record: SessionRecord) -> list[bytes]:
        """Return the keys of the blobs that the session needs and of those that it abandoned."""
        return [*self.blob_keys(record), *record.abandoned]

    def all(self) -> list[SessionRecord]:
        """Return every known record, the longest unused first."""
        with self._lock:
            return [x.record for x in self._entries.values()]

    def usable(self) -> list[SessionRecord]:
        """Return the records of this model that have not expired; their blobs may be evicted."""
        return [x for x in self.all() if self.records.is_usable(x) and not self.is_over(x)]

    def restorable(self) -> Iterator[Restorable]:
        """Yield the usable sessions, each with the blobs that show where it is stored."""
        with self._lock:
            entries = list(self._entries.items())
        for key, entry in entries:
            record = entry.record
            if entry.ends and self.records.is_usable(record) and not self.is_over(record):
                session = SessionRef(record.tenant, record.id, b"")
                yield Restorable(key, session, *entry.ends)

    def get(self, key: bytes) -> SessionRecord | None:
        """Return the record under this key from memory, without reading a tier."""
        with self._lock:
            entry = self._entries.get(key)
        return None if entry is None else entry.record

    def find(self, session: SessionRef) -> SessionRecord | None:
        """Return the session's record from memory, else the newest of the local tiers."""
        key = self.key_of(session)
        with self._lock:
            entry, num_removals = self._entries.get(key), self._num_removals
        if entry is not None:
            return entry.record
        found = self._newest(key, self._stack.local)
        if found is not None:
            with self._lock:
                # Meanwhile a save may have inserted it, or the session may have been removed.
                if key not in self._entries and num_removals == self._num_removals:
                    self._insert(key, found)
        return found

    def find_anywhere(self, session: SessionRef) -> SessionRecord | None:
        """Return the session's record from memory or a local tier, else from a shared tier."""
        return self.find(session) or self.find_shared(self.key_of(session))

    def find_shared(self, key: bytes) -> SessionRecord | None:
        """Return the newest record in a shared tier, where another engine may have put it."""
        return self._newest(key, self._stack.shared)

    def everywhere(self, key: bytes) -> list[SessionRecord]:
        """Return every copy of a record, from memory and each tier; a slow tier may be older."""
        copies = [self.get(key), *(self.find_in(i, key) for i in range(len(self._stack)))]
        return [x for x in copies if x is not None]

    # ---- which blobs sessions share

    def unused(self, keys: Iterable[bytes]) -> list[bytes]:
        """List those of ``keys`` that no known session needs."""
        with self._lock:
            return [x for x in keys if _number(x) not in self._users]

    def unshared(self, keys: Sequence[bytes], record_key: bytes) -> list[bytes]:
        """List those of ``keys`` that no known session needs except that of ``record_key``."""
        if not keys:
            return []
        with self._lock:
            entry = self._entries.get(record_key)
            own = {*self.records.counted_keys(entry.record, 0)} if entry is not None else set()
            return [x for x in keys if self._users[_number(x)] <= (x in own)]

    # ---- changes

    def load(self) -> None:
        """Put all records of the local tiers into the index, the newest copy of each session."""
        found: dict[bytes, SessionRecord] = {}
        for level in self._stack.local:
            for key, blob in self._stack.scan(level, RECORD):
                record = self._parsed(level, key, blob)
                if record is not None and _is_newer(record, found.get(key)):
                    found[key] = record
        for record in sorted(found.values(), key=lambda x: x.last_used_s):
            self.put(record)

    def put(self, record: SessionRecord) -> None:
        """Put a record into the index, in place of the session's older one."""
        with self._lock:
            self._insert(self.key(record), record)

    def use(self, key: bytes) -> None:
        """Note that the session was used now."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                used = msgspec.structs.replace(entry.record, last_used_s=self.clock())
                self._entries[key] = _Entry(used, entry.ends, entry.nbytes)
                self._entries.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Remove the session from the index; the tiers are left alone."""
        with self._lock:
            self._num_removals += 1
            self._take_out(key)

    # ---- expired sessions

    def is_over(self, record: SessionRecord) -> bool:
        """Return whether the session has expired. A pinned one never does."""
        age_s = self.clock() - record.last_used_s
        return bool(self._ttl_s) and age_s > self._ttl_s and not record.pinned

    def note(self, key: bytes, why: MissReason) -> None:
        """Remember why a session is not stored."""
        with self._lock:
            self._why_gone[key] = why
            if len(self._why_gone) > MAX_GONE:
                self._why_gone.popitem(last=False)

    def why_gone(self, session: SessionRef) -> MissReason | None:
        """Return the reason that ``note`` recorded for a session; None if there is none."""
        with self._lock:
            return self._why_gone.get(self.key_of(session))

    # ---- reading tiers

    def _newest(self, key: bytes, levels: Iterable[int]) -> SessionRecord | None:
        """Return the newest record in these tiers; None if it was forgotten since it was used."""
        copies = [x for i in levels if (x := self.find_in(i, key)) is not None]
        newest = max(copies, key=_recency, default=None)
        is_gone = newest is not None and newest.last_used_s <= self.forgotten.get(key, 0.0)
        return None if is_gone else newest

    def find_in(self, level: int, key: bytes) -> SessionRecord | None:
        """Return a tier's record under this key; None if there is none or no answer."""
        blob = self._stack.find(level, [key])[0]
        return None if blob is None else self._parsed(level, key, blob)

    def _parsed(self, level: int, key: bytes, blob: Blob) -> SessionRecord | None:
        try:
            record = self.records.unpack(key, blob, partial(self._stack.find, level))
            if self.key(record) != key:
                raise Mismatch("the record is of another session, or of another model's")
        except Corrupt:
            self._counters.add("corrupt")
            self._stack.delete(level, [key])
            return None
        except Unusable:  # records of other engines may be in the same tier; leave them untouched
            return None
        return record

    # ---- with the lock held

    def _insert(self, key: bytes, record: SessionRecord) -> None:
        """Put in a record; blobs of chunks that it shares with the older one stay counted."""
        self._why_gone.pop(key, None)
        before = self._entries.get(key)
        num_same = 0 if before is None else num_common_joined(before.record.chain, record.chain)
        self._take_out(key, num_same)
        new = self.records.counted_keys(record, num_same)
        num_blobs = num_same + num_same // PAGE_CHUNKS + len(new)
        nbytes = ENTRY_BYTES + record.nbytes + COUNTED_BYTES * num_blobs
        self._entries[key] = _Entry(record, self._ends(record), nbytes)
        self._entries.move_to_end(key)
        self._users.update(map(_number, new))
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes and len(self._entries) > 1:
            self._take_out(next(iter(self._entries)))

    def _take_out(self, key: bytes, num_kept: int = 0) -> None:
        """Remove an entry, and stop counting its blobs except its first ``num_kept`` chunks."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._nbytes -= entry.nbytes
        users = self._users
        for number in map(_number, self.records.counted_keys(entry.record, num_kept)):
            if (left := users[number] - 1) > 0:
                users[number] = left
            else:
                del users[number]

    def _ends(self, record: SessionRecord) -> tuple[bytes, bytes] | None:
        """Return the keys of the session's first and last state, or else of its chunks."""
        kind, places = STATE, record.states
        if not places and self.records.keys.growing and record.num_chunks:
            kind, places = CHUNK, (1, record.num_chunks)
        if not places:
            return None
        first, last = (
            kind + record.chain[(x - 1) * NAME_BYTES : x * NAME_BYTES]
            for x in (places[0], places[-1])
        )
        return first, last


def _is_newer(record: SessionRecord, other: SessionRecord | None) -> bool:
    return other is None or _recency(other) < _recency(record)


def _recency(record: SessionRecord) -> tuple[float, int]:
    """Return the sort key of a copy of a record: the time of last use, then the chain's length.

    A copy whose tier has evicted a page has a shorter chain.
    """
    return record.last_used_s, record.num_chunks


def _number(key: bytes) -> int:
    """Return 64 bits that stand for a key and take much less memory."""
    return int.from_bytes(key[1:9]) ^ key[0]
