"""Writing a session into the tiers: at once to the fastest, soon to the slower ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from kvstore.packer import Packer
from kvstore.pins import Pin, Pins
from kvstore.records import SessionRecord, TierName
from kvstore.session_index import SessionIndex
from kvstore.session_keys import KeyMaker
from kvstore.tier_stack import TierStack
from kvstore.write_behind import Delivery, WriteBehind, deliver


class Committer:
    """Thread-safe for different sessions; one session's commits exclude each other."""

    def __init__(
        self,
        stack: TierStack,
        slower: Sequence[WriteBehind],
        packer: Packer,
        keys: KeyMaker,
        index: SessionIndex,
        pins: Pins,
    ) -> None:
        self._stack = stack
        self._slower = slower
        self._packer = packer
        self._keys = keys
        self._index = index
        self._pins = pins

    def commit(
        self,
        record: SessionRecord,
        fresh: Mapping[bytes, bytes],
        obsolete: Sequence[bytes],
    ) -> bool:
        """Into the fastest tier; ``spread`` is to follow.

        False if no tier has it or will try to.
        """
        delivery = self._delivery(record, fresh, obsolete)
        delivered = deliver(self._stack, 0, delivery, whole=False)
        if not delivered.recorded and not self._slower:
            return False
        self._index.put(delivery.record_key, record)
        self.follow_pin(record)
        return True

    def spread(
        self,
        record: SessionRecord,
        fresh_of: Callable[[TierName], Mapping[bytes, bytes]],
        obsolete: Sequence[bytes],
    ) -> None:
        """What was committed, into the slower tiers: each has its own form of what is fresh."""
        for place, tier in enumerate(self._slower, 1):
            fresh = fresh_of(self._stack.name(place))
            tier.offer(self._delivery(record, fresh, obsolete))

    def replace(self, record: SessionRecord) -> None:
        """The same blobs under a changed record, in every tier."""
        if self.commit(record, {}, ()):
            self.spread(record, lambda tier: {}, ())

    def follow_pin(self, record: SessionRecord) -> None:
        """Pin what the record names, if it says so; let go of what an older one named."""
        if record.pinned:
            self._pins.follow(self.pin_of(record))
        else:
            self._pins.release(self._keys.record_key(record))

    def pin_of(self, record: SessionRecord) -> Pin:
        key = self._keys.record_key(record)
        keys = [key, *self._keys.listed(record)]
        return Pin(key, record.tenant, keys, record.pinned_bytes)

    def send(self, place: int, record: SessionRecord) -> Future[bool]:
        """Bring a session as it is to one slower tier; the result says if all of it is there."""
        delivery = self._delivery(record, {}, ())
        self._slower[place - 1].offer(delivery)
        return delivery.done

    def cancel(self, record_key: bytes) -> None:
        """Nothing of this session is written any more when this returns."""
        for tier in self._slower:
            tier.cancel(record_key)

    def catch_up(self) -> None:
        """Send again what slower tiers did not take."""
        for place, tier in enumerate(self._slower, 1):
            for key in tier.take_behind():
                record = self._index.get(key)
                if record is not None:
                    self.send(place, record)

    def _delivery(
        self, record: SessionRecord, fresh: Mapping[bytes, bytes], obsolete: Sequence[bytes]
    ) -> Delivery:
        key = self._keys.record_key(record)
        blob = self._packer.pack_record(key, record)
        return Delivery(key, blob, self._keys.listed(record), fresh, obsolete)
