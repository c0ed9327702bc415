"""Writes a session into the tiers: at once to the fastest, soon to the slower ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Generic

from kvstore.blobs.codec_set import CodecSet
from kvstore.ledger.claims import Claims
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.pins import PinnedSession, Pins
from kvstore.ledger.record import R, RecordKind
from kvstore.ledger.stack import TierStack
from kvstore.ledger.write_behind import Delivery, WriteBehind, deliver
from kvstore.session import TierName
from kvstore.tiers.base import Blob


class Committer(Generic[R]):
    """Thread-safe for different sessions; a caller has claimed the session that it commits.

    A record reaches a slower tier only through that tier's queue, so an older record that still
    waits there is never written after it.
    """

    def __init__(
        self,
        kind: RecordKind[R],
        stack: TierStack,
        slower: Sequence[WriteBehind],
        index: SessionIndex[R],
        pins: Pins,
    ) -> None:
        self._kind = kind
        self._stack = stack
        self._slower = slower
        self._index = index
        self._pins = pins

    def commit(self, record: R, fresh: Mapping[bytes, Blob], obsolete: Sequence[bytes]) -> bool:
        """Write a session into the fastest tier; the caller then calls ``replicate``.

        Args:
            fresh: new blobs by key.
            obsolete: keys of blobs that are unused once the record is written.

        Returns:
            False if no tier has the session or will try to write it; it then stays as it was.
        """
        if not len(self._stack):
            return False
        delivery = self._delivery(record, fresh, obsolete)
        if not deliver(self._stack, 0, delivery, whole=False).recorded and not self._slower:
            return False
        self.take(record, delivery.chain)
        return True

    def take(self, record: R, blob_keys: Sequence[bytes] | None = None) -> None:
        """Put this record into the index, and pin its blobs if it is pinned."""
        self._index.put(record, blob_keys)
        self.follow_pin(record)

    def replicate(
        self,
        record: R,
        fresh_of: Callable[[TierName], Mapping[bytes, Blob]],
        obsolete: Sequence[bytes],
    ) -> None:
        """Queue a committed session for the slower tiers; each may have blobs of its own codec."""
        for level, tier in enumerate(self._slower, 1):
            fresh = fresh_of(self._stack.name(level))
            tier.offer(self._delivery(record, fresh, obsolete))

    def save(
        self,
        record: R,
        fresh: Mapping[bytes, Blob],
        obsolete: Sequence[bytes],
        codecs: CodecSet,
        others: Iterable[tuple[str, Mapping[bytes, Blob]]],
    ) -> bool:
        """Write a session into all tiers; False if none takes it.

        Args:
            fresh: new blobs by key, in the codec of the fastest tier.
            others: the same in other codecs of ``codecs``, by id. They may be made one by one while
                they are asked for, once the fastest tier has the session. Tiers for whose codec
                there is nothing get ``fresh``, also if one of them cannot be made.
        """
        if not self.commit(record, fresh, obsolete):
            return False
        forms: dict[str, Mapping[bytes, Blob]] = {}
        try:
            forms.update(others)
        finally:
            self.replicate(record, lambda tier: forms.get(codecs.of(tier).id, fresh), obsolete)
        return True

    def replace(self, record: R) -> bool:
        """Write a changed record over the same blobs, in every tier; False if none takes it."""
        if not self.commit(record, {}, ()):
            return False
        self.replicate(record, lambda tier: {}, ())
        return True

    def follow_pin(self, record: R) -> None:
        """Pin the record's blobs if it is pinned; else release those of an older record."""
        if record.pinned:
            self._pins.follow(self.pin_of(record))
        else:
            self._pins.release(self._index.key(record))

    def pin_of(self, record: R) -> PinnedSession:
        """The session in the form that ``Pins`` counts."""
        key = self._index.key(record)
        keys = [key, *self._index.blob_keys(record)]
        return PinnedSession(key, record.tenant, keys, record.pinned_bytes)

    def send(self, level: int, record: R) -> Future[bool]:
        """Bring a claimed session as it is to one slower tier; the result: all of it is there."""
        delivery = self._delivery(record, {}, ())
        self._slower[level - 1].offer(delivery)
        return delivery.done

    def cancel(self, record_key: bytes) -> None:
        """Drop waiting writes of this session; none of them is running when this returns."""
        for tier in self._slower:
            tier.cancel(record_key)

    def catch_up(self, claims: Claims) -> None:
        """Send sessions again that slower tiers did not take."""
        for level, tier in enumerate(self._slower, 1):
            for key in tier.take_behind():
                with claims.claim(key):
                    record = self._index.get(key)
                    if record is not None:
                        self.send(level, record)

    def _delivery(
        self, record: R, fresh: Mapping[bytes, Blob], obsolete: Sequence[bytes]
    ) -> Delivery:
        key, blob = self._index.key(record), self._kind.pack(record)
        return Delivery(key, blob, self._index.blob_keys(record), fresh, obsolete, record.tenant)
