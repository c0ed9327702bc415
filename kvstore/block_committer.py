"""Writing a session of blocks into the tiers: at once to the fastest, soon to the slower ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from kvstore.block_index import BlockIndex
from kvstore.block_records import BlockRecord
from kvstore.pins import Pin, Pins
from kvstore.records import TierName
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob
from kvstore.write_behind import Delivery, WriteBehind, deliver


class BlockCommitter:
    """Thread-safe for different sessions; whoever commits one of them has claimed it.

    A record reaches a slower tier only through that tier's queue, so that an older one which still
    waits there never comes after it.
    """

    def __init__(
        self, stack: TierStack, slower: Sequence[WriteBehind], index: BlockIndex, pins: Pins
    ) -> None:
        self._stack = stack
        self._slower = slower
        self._index = index
        self._pins = pins

    def commit(
        self,
        record: BlockRecord,
        fresh: Mapping[bytes, Blob],
        obsolete: Sequence[bytes],
    ) -> bool:
        """The session is now what ``record`` says; ``spread`` is to follow.

        False if no tier has it or will try to.
        """
        if not self._is_taken(self._delivery(record, fresh, obsolete)):
            return False
        self.follow_pin(record)
        self._index.put(record)
        return True

    def spread(
        self,
        record: BlockRecord,
        fresh_of: Callable[[TierName], Mapping[bytes, Blob]],
        obsolete: Sequence[bytes],
    ) -> None:
        """What was committed, into the slower tiers: each has its own form of what is fresh."""
        for place, tier in enumerate(self._slower, 1):
            fresh = fresh_of(self._stack.name(place))
            tier.offer(self._delivery(record, fresh, obsolete))

    def replace(self, record: BlockRecord) -> None:
        """The same blobs under a changed record, in every tier."""
        if self.commit(record, {}, ()):
            self.spread(record, lambda tier: {}, ())

    def _is_taken(self, delivery: Delivery) -> bool:
        if not len(self._stack):
            return False
        return deliver(self._stack, 0, delivery, whole=False).recorded or bool(self._slower)

    def follow_pin(self, record: BlockRecord) -> None:
        """Pin what the record names, if it says so; let go of what an older one named."""
        if record.pinned:
            self._pins.follow(self.pin_of(record))
        else:
            self._pins.release(self._index.key(record))

    def pin_of(self, record: BlockRecord) -> Pin:
        key = self._index.key(record)
        return Pin(key, record.tenant, [key, *self._index.chain(record)], record.pinned_bytes)

    def send(self, place: int, record: BlockRecord) -> Future[bool]:
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
        self, record: BlockRecord, fresh: Mapping[bytes, Blob], obsolete: Sequence[bytes]
    ) -> Delivery:
        chain = self._index.chain(record)
        return Delivery(self._index.key(record), self._index.pack(record), chain, fresh, obsolete)
