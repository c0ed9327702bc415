"""Merges a new save into a session's older record.

The new record replaces the old one regardless of the tokens they share: the new chain may be longer
(the usual update), shorter (an answer is generated again), or depart from the old one half-way (an
edited message). The old tail is deleted, and so are states that are no longer kept. Chunks of an
abandoned branch stay, since the user may return to it; the record remembers them so that ``forget``
finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.blobs.chain import CHUNK, Chain, Tokens, common_prefix
from kvstore.blobs.packer import Packer
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import abandoned_chunks, codecs_of
from kvstore.session import SessionRef
from kvstore.store.records import SessionRecord
from kvstore.store.token_keys import TokenKeys


@dataclass(frozen=True)
class SessionUpdate:
    """A session as it is to be saved, with its older record."""

    session: SessionRef
    tokens: Tokens
    root: bytes
    chain: Chain
    old: SessionRecord | None

    @property
    def common(self) -> int:
        """Count the leading tokens of the older record that are unchanged."""
        if self.old is None or self.old.root != self.root:
            return 0
        return common_prefix(self.old.tokens, self.tokens)


@dataclass(frozen=True)
class Revision:
    record: SessionRecord
    obsolete: list[bytes]  # keys that are unused once the record is replaced


class Reviser:
    def __init__(self, keys: TokenKeys, index: SessionIndex[SessionRecord], packer: Packer) -> None:
        self._keys = keys
        self._index = index
        self._packer = packer

    def revise(
        self,
        update: SessionUpdate,
        snapshots: tuple[int, ...],
        now_s: float,
        packed_bytes: int,
        state_bytes: int,
        tail_bytes: int,
    ) -> Revision:
        remembered, overflow = self._left_behind(update)
        record = SessionRecord(
            tenant=update.session.tenant,
            id=update.session.id,
            fingerprint=self._packer.fingerprint,
            codecs=codecs_of(self._packer.readable, update.old.codecs if update.old else ()),
            root=update.root,
            token_ids=update.tokens.tobytes(),
            tail_tokens=len(update.tokens) % self._keys.space.chunk_tokens,
            snapshots=snapshots,
            last_used_s=now_s,
            left_behind=remembered,
            pinned=update.old.pinned if update.old else False,
            packed_bytes=packed_bytes,
            state_bytes=state_bytes,
            tail_bytes=tail_bytes,
        )
        return Revision(record, self._obsolete(update, record, overflow))

    def _left_behind(self, update: SessionUpdate) -> tuple[bytes, list[bytes]]:
        """Digests of abandoned chunks, oldest first, and keys of those beyond the limit."""
        if update.old is None:
            return b"", []
        before, now = update.old.abandoned, self._abandoned_now(update)
        keys, overflow = abandoned_chunks(before, now, set(update.chain.chunk_keys))
        return b"".join(x[len(CHUNK) :] for x in keys), overflow

    def _abandoned_now(self, update: SessionUpdate) -> list[bytes]:
        assert update.old is not None
        size, old = self._keys.space.chunk_tokens, update.old
        shared = update.common // size
        if not self._keys.growing or shared == old.num_tokens // size:
            return []
        return self._keys.chain(old).chunk_keys[shared:]

    def _obsolete(
        self, update: SessionUpdate, record: SessionRecord, overflow: list[bytes]
    ) -> list[bytes]:
        if update.old is None:
            return []
        before = [x for x in self._keys.spans(update.old) if not x.is_chunk]
        kept = {x.key for x in self._keys.spans(record, update.chain)}
        gone = [x.key for x in before if x.key not in kept] + overflow
        return self._index.unshared(gone, self._index.key(update.old))
