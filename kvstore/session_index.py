"""Which sessions this store knows: a small copy of their records in memory.

The index is a belief. It saves reading a record at every turn, answers ``records()``, and says
which chunks two sessions share; whether a session can be restored, only the tiers say. It is built
from the local tiers at the start, is bounded in bytes, and loses the longest unused first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

import msgspec

from kvstore.chain import RECORD, KeySpace, common_prefix
from kvstore.departures import Listed
from kvstore.errors import Corrupt, Mismatch
from kvstore.packer import Packer
from kvstore.records import SessionRecord, SessionRef
from kvstore.session_keys import KeyMaker, left_behind_keys
from kvstore.stats import Counters
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob

ENTRY_BYTES = 512  # of a record besides its tokens
MAX_EXPIRED = 4096  # sessions of which it is remembered that their time ran out


class SessionIndex:
    """Records by record key. Thread-safe; tiers are read without the lock held."""

    def __init__(
        self,
        stack: TierStack,
        packer: Packer,
        keys: KeyMaker,
        counters: Counters,
        clock: Callable[[], float],
        *,
        max_bytes: int,
        ttl_s: float,
    ) -> None:
        self._stack = stack
        self._packer = packer
        self._keys = keys
        self._counters = counters
        self._clock = clock
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, SessionRecord] = OrderedDict()  # longest unused first
        self._expired: OrderedDict[bytes, None] = OrderedDict()
        self._nbytes = 0
        self._num_drops = 0

    @property
    def space(self) -> KeySpace:
        return self._keys.space

    def __len__(self) -> int:
        return len(self._records)

    def all(self) -> list[SessionRecord]:
        with self._lock:
            return list(self._records.values())

    def restorable(self) -> list[Listed]:
        """Sessions that this engine could restore, if tiers still hold them."""
        usable = [(x, self._keys.listed(x)) for x in self.all() if self.is_usable(x)]
        return [
            Listed(self._keys.record_key(x), SessionRef(x.tenant, x.id, b""), names[0])
            for x, names in usable
            if names
        ]

    def get(self, key: bytes) -> SessionRecord | None:
        with self._lock:
            return self._records.get(key)

    def put(self, key: bytes, record: SessionRecord) -> None:
        with self._lock:
            self._insert(key, record)

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._num_drops += 1
            self._remove(key)

    def use(self, key: bytes) -> None:
        """Somebody came back to this session."""
        with self._lock:
            record = self._records.pop(key, None)
            if record is not None:
                self._records[key] = msgspec.structs.replace(record, last_used_s=self._clock())

    def lapsed(self, record: SessionRecord) -> bool:
        """Nobody came back for longer than sessions are kept."""
        age_s = self._clock() - record.last_used_s
        return bool(self._ttl_s) and age_s > self._ttl_s and not record.pinned

    def is_usable(self, record: SessionRecord) -> bool:
        return self._packer.wrote(record) and not self.lapsed(record)

    def expire(self, key: bytes) -> None:
        """Drop, and remember why."""
        with self._lock:
            self._remove(key)
            self._expired[key] = None
            if len(self._expired) > MAX_EXPIRED:
                self._expired.popitem(last=False)

    def is_expired(self, key: bytes) -> bool:
        with self._lock:
            return key in self._expired

    def load(self) -> None:
        """Fill from the local tiers; the newest record of a session wins."""
        found: dict[bytes, SessionRecord] = {}
        for i in self._stack.local:
            for key, record in self._scan(i):
                if key not in found or found[key].last_used_s < record.last_used_s:
                    found[key] = record
        for key, record in sorted(found.items(), key=lambda x: x[1].last_used_s):
            self.put(key, record)

    def find(self, session: SessionRef) -> SessionRecord | None:
        """From memory, else from the local tiers."""
        key = self.space.record_key(session.tenant, session.id)
        with self._lock:
            known, num_drops = self._records.get(key), self._num_drops
        if known is None and (known := self._newest(key, self._stack.local)) is not None:
            with self._lock:
                # A save may have been faster; or the session was forgotten while it was read.
                if key not in self._records and num_drops == self._num_drops:
                    self._insert(key, known)
        return known

    def find_usable(self, session: SessionRef) -> SessionRecord | None:
        """From wherever there is one; only if its blobs can be used here and now."""
        known = self.find(session) or self.find_shared(session)
        if known is None or known.root != self.space.root(session.salt) or self.lapsed(known):
            return None
        return known if self.is_readable(known) else None

    def find_shared(self, session: SessionRef) -> SessionRecord | None:
        """From the tiers that other engines write to; asked each time."""
        key = self.space.record_key(session.tenant, session.id)
        return self._newest(key, self._stack.shared)

    def is_readable(self, record: SessionRecord) -> bool:
        """Some of its blobs are in a codec that is known here."""
        return self._packer.reads_any(record.codecs)

    def is_all_readable(self, record: SessionRecord) -> bool:
        return self._packer.reads_all(record.codecs)

    def everywhere(self, key: bytes) -> list[SessionRecord]:
        """Each tier's own copy: a slow tier may hold an older one."""
        places = range(len(self._stack))
        copies = [self.get(key), *(self._read(i, key) for i in places)]
        return [x for x in copies if x is not None]

    def used_by_others(self, record: SessionRecord, keys: Collection[bytes]) -> set[bytes]:
        """Those of ``keys``, blobs of ``record``, that another session here needs too."""
        names = self._keys.of(record)
        others = [(x, common_prefix(record.tokens, x.tokens)) for x in self._relatives(record)]
        # Chunks are chained, so two sessions share a run of them from the first one on.
        longest = max((n for _, n in others), default=0)
        used = set(names.chunks[: longest // self.space.chunk_tokens])
        for other, common in others:
            used |= {names.snapshots.get(x, b"") for x in other.snapshots if x <= common}
        abandoned = set(keys).intersection(left_behind_keys(record)) - used
        if abandoned:  # these may begin like nothing of the session now
            used |= {key for other, _ in others for key in self._keys.listed(other)}
        return used.intersection(keys)

    def _relatives(self, record: SessionRecord) -> Iterator[SessionRecord]:
        key = self._keys.record_key(record)
        with self._lock:
            records = list(self._records.items())
        yield from (x for other, x in records if other != key and x.root == record.root)

    def _newest(self, key: bytes, places: list[int]) -> SessionRecord | None:
        copies = [x for i in places if (x := self._read(i, key)) is not None]
        return max(copies, key=lambda x: x.last_used_s, default=None)

    def _read(self, i: int, key: bytes) -> SessionRecord | None:
        blob = self._stack.find(i, [key])[0]
        return None if blob is None else self._parsed(i, key, blob)

    def _scan(self, i: int) -> Iterator[tuple[bytes, SessionRecord]]:
        for key, blob in self._stack.scan(i, RECORD):
            record = self._parsed(i, key, blob)
            if record is not None:
                yield key, record

    def _parsed(self, i: int, key: bytes, blob: Blob) -> SessionRecord | None:
        try:
            record = self._packer.unpack_record(blob, key)
        except Corrupt:
            self._counters.add("corrupt")
            self._stack.delete(i, [key])
            return None
        except Mismatch:  # of another release, which may still want it
            return None
        # Another model's sessions may rest in the same place; they are none of our business.
        if self._keys.record_key(record) != key:
            return None
        self._stack.meet(record.codecs)
        return record

    def _insert(self, key: bytes, record: SessionRecord) -> None:
        self._remove(key)
        self._expired.pop(key, None)
        self._records[key] = record
        self._nbytes += _nbytes(record)
        while self._nbytes > self._max_bytes and len(self._records) > 1:
            self._remove(next(iter(self._records)))

    def _remove(self, key: bytes) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._nbytes -= _nbytes(record)


def _nbytes(record: SessionRecord) -> int:
    return ENTRY_BYTES + len(record.token_ids) + len(record.left_behind)
