"""How many bytes one session really takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.chain import CHUNK, KEY_BYTES, SNAPSHOT, TAIL
from kvstore.marks import MARK_BYTES
from kvstore.packer import Packer
from kvstore.records import SessionRecord
from kvstore.session_keys import KeyMaker
from kvstore.tier_stack import TierStack


@dataclass(frozen=True)
class SessionBytes:
    """Blobs as they rest in the fastest tier that has them, headers included.

    Shared chunks count for each session.
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


def measure(
    stack: TierStack, packer: Packer, keys: KeyMaker, record: SessionRecord
) -> SessionBytes:
    """Reads every blob that is still held; for benchmarks and tests."""
    names = keys.listed(record)
    record_key = keys.record_key(record)
    sizes = {CHUNK: 0, TAIL: 0, SNAPSHOT: 0}
    num_blobs = 1
    for key, place in zip(names, stack.locate(names).places, strict=True):
        blob = None if place is None else stack.find(place, [key])[0]
        if blob is not None:
            sizes[key[:1]] += len(blob)
            num_blobs += 1
    return SessionBytes(
        chunks=sizes[CHUNK],
        tail=sizes[TAIL],
        snapshots=sizes[SNAPSHOT],
        record=len(packer.pack_record(record_key, record)),
        keys=num_blobs * KEY_BYTES + (num_blobs - 1) * MARK_BYTES,
        num_blobs=num_blobs,
    )
