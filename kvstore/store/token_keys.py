"""All blobs of one session, by key, in the order of their importance.

A session's blobs are its full chunks, followed by either the tail or, for a model whose cache
cannot be cut, its snapshots. The order is that of use: evicting from the end loses the least.
Nothing can be restored without a state, so the newest one is in front. The chunks follow in the
order of their tokens. Older states are at the end: they are large, and a turn that continues the
answer does not need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import SNAPSHOT, TAIL, Chain, KeySpace
from kvstore.blobs.packer import RECORD_CODEC, Packer
from kvstore.errors import Mismatch
from kvstore.kept_states import by_worth
from kvstore.store.records import SessionRecord, decode_record, encode_record, left_behind_keys
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class SessionKeys:
    """The keys of one session's blobs, by kind."""

    chunks: list[bytes]
    tail: bytes | None
    snapshots: dict[int, bytes]  # by position, ascending

    @property
    def states(self) -> list[bytes]:
        """Keys of the snapshots, the newest first."""
        return [self.snapshots[x] for x in by_worth(self.snapshots)]

    def in_order(self) -> list[bytes]:
        """The newest state, the chunks, the tail, the older states."""
        tail = [self.tail] if self.tail else []
        return [*self.states[:1], *self.chunks, *tail, *self.states[1:]]


class KeyMaker:
    """Determines which kinds of blobs this store's sessions have.

    Args:
        growing: the model has layers that grow with the tokens.
        needs_state: its cache cannot be cut back, so sessions have snapshots and no tail.
    """

    def __init__(self, space: KeySpace, *, growing: bool, needs_state: bool) -> None:
        self.space = space
        self.growing = growing
        self.needs_state = needs_state

    def record_key(self, record: SessionRecord) -> bytes:
        """The key under which the record itself is stored."""
        return self.space.record_key(record.tenant, record.id)

    def of(self, record: SessionRecord, chain: Chain | None = None) -> SessionKeys:
        """Return the keys of all its blobs. ``chain``: of its tokens, if it was hashed before."""
        chain = chain or self.space.chain(record.root, record.tokens)
        has_tail = self.growing and not self.needs_state and record.tail_tokens > 0
        return SessionKeys(
            chain.chunk_keys if self.growing else [],
            chain.tail_key(record.tenant, record.id) if has_tail else None,
            {x: chain.snapshot_key(x) for x in record.snapshots},
        )


class TokenRecords:
    """Describes records of chains of tokens to the ledger: see ``RecordKind``."""

    def __init__(self, keys: KeyMaker, packer: Packer) -> None:
        self._keys = keys
        self._packer = packer

    def key(self, tenant: str, session_id: str) -> bytes:
        return self._keys.space.record_key(tenant, session_id)

    def blob_keys(self, record: SessionRecord) -> list[bytes]:
        return self._keys.of(record).in_order()

    def num_spare(self, record: SessionRecord) -> int:
        return max(0, len(record.snapshots) - 1)

    def first_blob(self, record: SessionRecord, blob_keys: Sequence[bytes]) -> bytes | None:
        return blob_keys[0] if blob_keys else None

    def left_behind(self, record: SessionRecord) -> Sequence[bytes]:
        return left_behind_keys(record)

    def resized(self, record: SessionRecord, sizes: Mapping[bytes, int]) -> SessionRecord:
        """The record with the present sizes of its blobs, given by key."""
        return msgspec.structs.replace(
            record,
            packed_bytes=sum(sizes.values()),
            tail_bytes=sum(n for key, n in sizes.items() if key[:1] == TAIL),
            state_bytes=sum(n for key, n in sizes.items() if key[:1] == SNAPSHOT),
        )

    def nbytes(self, record: SessionRecord) -> int:
        return len(record.token_ids) + len(record.left_behind)

    def is_usable(self, record: SessionRecord) -> bool:
        ours = record.fingerprint == self._packer.fingerprint
        return ours and self._packer.reads_any(record.codecs)

    def pack(self, record: SessionRecord) -> Blob:
        key = self.key(record.tenant, record.id)
        header = self._packer.record_header(key, record.num_tokens)
        return blobs.pack(header, encode_record(record))

    def unpack(self, key: bytes, blob: Blob) -> SessionRecord:
        """Read a record of any model; callers that use it compare ``root``."""
        header, payload = blobs.parse(blob)
        if header.key != key or header.codec != RECORD_CODEC:
            raise Mismatch("the record is of another session")
        return decode_record(payload)
