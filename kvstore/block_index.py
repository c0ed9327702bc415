"""Which sessions of blocks this store knows, and which blobs they share."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict

from kvstore import format as blobs
from kvstore.block_keys import BlockKeys, Piece
from kvstore.block_records import BlockRecord, decode_block_record, encode_block_record
from kvstore.chain import RECORD
from kvstore.departures import Listed
from kvstore.errors import Mismatch, Unusable
from kvstore.records import SessionRef
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob

_RECORD_CODEC = b"msgpack.1"
_ENTRY_BYTES = 512  # what Python keeps per record besides its hashes

_log = logging.getLogger(__name__)


class BlockIndex:
    """Thread-safe. Bounded in bytes: the longest unused sessions are no longer listed."""

    def __init__(self, stack: TierStack, keys: BlockKeys, fingerprint: str, max_bytes: int) -> None:
        self._stack = stack
        self._keys = keys
        self._fingerprint = blobs.fingerprint_digest(fingerprint)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, BlockRecord] = OrderedDict()
        self._users: Counter[bytes] = Counter()  # sessions per blob
        self._nbytes = 0
        self._num_removals = 0

    def load(self) -> None:
        """What local tiers kept from an earlier life of this process."""
        found: dict[bytes, BlockRecord] = {}
        for place in self._stack.local:
            for key, blob in self._stack.scan(place, RECORD):
                record = self._read(key, blob)
                if record is not None and key not in found:
                    found[key] = record
        for _, record in sorted(found.items(), key=lambda x: x[1].last_used_s):
            self.put(record)

    def key(self, record: BlockRecord) -> bytes:
        return self._keys.record_key(record.tenant, record.id)

    def pieces(self, record: BlockRecord) -> list[Piece]:
        """States first: without one, nothing of the chain can be used."""
        hashes = record.block_hashes
        states = [self._keys.state(hashes, x) for x in record.states]
        return [*states, *self._keys.covering(hashes, record.part)]

    def chain(self, record: BlockRecord) -> list[bytes]:
        """Keys of all its blobs, in order."""
        return [x.key for x in self.pieces(record)]

    def get(self, key: bytes) -> BlockRecord | None:
        """From memory only."""
        with self._lock:
            return self._records.get(key)

    def find(self, tenant: str, session_id: str) -> BlockRecord | None:
        """From memory, else from the local tiers."""
        key = self._keys.record_key(tenant, session_id)
        with self._lock:
            known, num_removals = self._records.get(key), self._num_removals
        if known is None and (known := self._newest(key)) is not None:
            with self._lock:
                # A commit may have been faster; or the session was removed while it was read.
                if key not in self._records and num_removals == self._num_removals:
                    self._insert(key, known)
        return known

    def _newest(self, key: bytes) -> BlockRecord | None:
        blobs = [self._stack.find(place, [key])[0] for place in self._stack.local]
        copies = [x for blob in blobs if blob is not None and (x := self._read(key, blob))]
        return max(copies, key=lambda x: x.last_used_s, default=None)

    def find_shared(self, tenant: str, session_id: str) -> BlockRecord | None:
        """As another engine left it in a tier that engines share."""
        key = self._keys.record_key(tenant, session_id)
        for place in self._stack.shared:
            blob = self._stack.find(place, [key])[0]
            if blob is not None:
                return self._read(key, blob)
        return None

    def all(self) -> list[BlockRecord]:
        """The longest unused first."""
        with self._lock:
            return list(self._records.values())

    def put(self, record: BlockRecord) -> None:
        with self._lock:
            self._insert(self.key(record), record)

    def restorable(self) -> list[Listed]:
        """Sessions with anything to restore, if tiers still hold it."""
        return [
            Listed(self.key(x), SessionRef(x.tenant, x.id, b""), pieces[0].key)
            for x in self.all()
            if (pieces := self._keys.whole(x.block_hashes[: self._keys.chunk_blocks]))
        ]

    def everywhere(self, key: bytes) -> list[BlockRecord]:
        """Each tier's own copy: a slow tier may hold an older one."""
        blobs = [self._stack.find(i, [key])[0] for i in range(len(self._stack))]
        copies = [self.get(key), *(self._read(key, x) for x in blobs if x is not None)]
        return [x for x in copies if x is not None]

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._num_removals += 1
            self._take_out(key)

    def unused(self, keys: list[bytes]) -> list[bytes]:
        """Those of ``keys`` that no listed session needs."""
        with self._lock:
            return [x for x in keys if x not in self._users]

    def unshared(self, keys: list[bytes], record: BlockRecord) -> list[bytes]:
        """Those of ``keys`` that no other listed session needs."""
        own = {x.key for x in self.pieces(record)}
        listed = self.key(record) in self._records
        with self._lock:
            return [x for x in keys if self._users[x] <= (listed and x in own)]

    def pack(self, record: BlockRecord) -> bytes:
        key, size = self.key(record), len(record.hashes) // 32
        header = blobs.Header(key, _RECORD_CODEC, self._fingerprint, bytes(16), 0, size)
        return blobs.pack(header, encode_block_record(record))

    def _read(self, key: bytes, blob: Blob) -> BlockRecord | None:
        """None for what is damaged, or was written by another model, rank or release."""
        try:
            header, payload = blobs.parse(blob)
            if (header.key, header.fingerprint) != (key, self._fingerprint):
                return None
            record = decode_block_record(payload)
            if self.key(record) != key or record.block_tokens != self._keys.block_tokens:
                raise Mismatch("the record is of another session or block size")
            self._stack.meet(record.codecs)
            return record
        except Unusable as error:
            _log.warning("a session record cannot be used: %s", error)
            return None

    def _insert(self, key: bytes, record: BlockRecord) -> None:
        self._take_out(key)
        self._records[key] = record
        self._users.update(x.key for x in self.pieces(record))
        self._nbytes += _nbytes(record)
        while self._nbytes > self._max_bytes and len(self._records) > 1:
            self._take_out(next(iter(self._records)))

    def _take_out(self, key: bytes) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        self._nbytes -= _nbytes(record)
        for piece in self.pieces(record):
            self._users[piece.key] -= 1
            if not self._users[piece.key]:
                del self._users[piece.key]


def _nbytes(record: BlockRecord) -> int:
    ids = 36 * len(record.part)
    return _ENTRY_BYTES + 2 * len(record.hashes) + 33 * len(record.left_behind) + ids
