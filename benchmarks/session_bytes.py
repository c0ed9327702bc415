"""Measures how many bytes one session takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.blobs.chain import CHUNK, KEY_BYTES, SNAPSHOT, TAIL
from kvstore.blobs.codec_set import TAG_BYTES
from kvstore.session import SessionRef
from kvstore.store.token_store import ColdStore


@dataclass(frozen=True)
class SessionBytes:
    """Bytes of blobs as stored in the fastest tier that has them, headers included.

    Shared chunks count fully for each session.
    """

    chunks: int
    tail: int
    snapshots: int
    record: int
    keys: int
    num_blobs: int

    @property
    def total(self) -> int:
        return self.chunks + self.tail + self.snapshots + self.record + self.keys


def session_bytes(store: ColdStore, session: SessionRef) -> SessionBytes | None:
    """Read every blob that is still held and add up their bytes; None: no such session."""
    record = store.record(session)
    if record is None:
        return None
    stack, keys = store.ledger.stack, store.ledger.index.blob_keys(record)
    sizes = {CHUNK: 0, TAIL: 0, SNAPSHOT: 0}
    num_blobs = 1
    for key, level in zip(keys, stack.locate(keys).levels, strict=True):
        blob = None if level is None else stack.find(level, [key])[0]
        if blob is not None:
            sizes[key[:1]] += len(blob)
            num_blobs += 1
    return SessionBytes(
        chunks=sizes[CHUNK],
        tail=sizes[TAIL],
        snapshots=sizes[SNAPSHOT],
        record=len(store.ledger.kind.pack(record)),
        keys=num_blobs * KEY_BYTES + (num_blobs - 1) * TAG_BYTES,
        num_blobs=num_blobs,
    )
