"""What happens to a session of blocks between its turns: moving it, pinning, forgetting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.block_committer import BlockCommitter
from kvstore.block_index import BlockIndex
from kvstore.block_keys import BlockKeys
from kvstore.block_records import BlockRecord
from kvstore.claims import Claims
from kvstore.deletions import Deletions
from kvstore.departures import Departures
from kvstore.pins import Pins
from kvstore.records import SessionRef, TierName
from kvstore.tier_stack import TierStack
from kvstore.workers import Workers

WAIT_S: Final = 30.0  # for what is on its way from tier to tier


class BlockUpkeep:
    """Thread-safe. Every verb may wait for a commit of the session, or for a tier."""

    def __init__(
        self,
        stack: TierStack,
        committer: BlockCommitter,
        index: BlockIndex,
        keys: BlockKeys,
        pins: Pins,
        claims: Claims,
        workers: Workers,
        departures: Departures,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stack = stack
        self._committer = committer
        self._index = index
        self._keys = keys
        self._pins = pins
        self._claims = claims
        self._workers = workers
        self._departures = departures
        self._deletions = Deletions(stack)
        self._ttl_s = ttl_s
        self._clock = clock
        self._pinning = threading.Lock()  # the share is looked at and taken in one step

    def tier_of(self, record: BlockRecord) -> TierName | None:
        """The slowest tier that must be read; None if not even its beginning is held."""
        located = self._stack.locate(self._index.chain(record))
        places = [x for x in located.places[: located.num_leading] if x is not None]
        return self._stack.name(max(places)) if places else None

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier``, then drop faster copies; says where it rests."""
        record = self._index.find(session.tenant, session.id)
        if record is None:
            return None
        place = self._stack.place(tier)
        if place and not record.pinned and self._brought(record, place):
            own = self._index.unshared(self._index.chain(record), record)
            for faster in range(place):
                self._stack.delete(faster, own)
        return self.tier_of(record)

    def _brought(self, record: BlockRecord, place: int) -> bool:
        try:
            return self._committer.send(place, record).result(timeout=WAIT_S)
        except TimeoutError:
            return False

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Nothing happens for a session that was never saved. Raises ``PinLimit``."""
        with self._claims.claim(self._key(session)), self._pinning:
            record = self._index.find(session.tenant, session.id)
            if record is None or record.pinned == pinned:
                return
            if pinned:
                self._pins.check(self._committer.pin_of(record))
            self._committer.replace(msgspec.structs.replace(record, pinned=pinned))

    def forget(self, session: SessionRef) -> bool:
        """Remove every blob of the session that no other session here uses."""
        with self._claims.claim(self._key(session)):
            return self._removed(self._key(session))

    def expire(self) -> None:
        """Forget what nobody came back to, tell of what was evicted, do deletions still owed."""
        for record in self._index.all():
            if self._lapsed(record):
                self._let_lapse(SessionRef(record.tenant, record.id, b""))
        self._departures.look()
        self._deletions.retry()

    def _let_lapse(self, session: SessionRef) -> None:
        with self._claims.claim(self._key(session)):
            record = self._index.get(self._key(session))
            if record is None or not self._lapsed(record):  # somebody has come back meanwhile
                return
            self._removed(self._key(session))
        self._departures.tell(session)

    def _lapsed(self, record: BlockRecord) -> bool:
        age_s = self._clock() - record.last_used_s
        return bool(self._ttl_s) and age_s > self._ttl_s and not record.pinned

    def _removed(self, key: bytes) -> bool:
        """Of a claimed session. False if nothing was known of it."""
        self._committer.cancel(key)
        copies = self._index.everywhere(key)
        self._index.remove(key)
        self._workers.quiet(WAIT_S)  # blobs on their way to a faster tier
        self._pins.release(key)
        doomed = {x for copy in copies for x in (*self._index.chain(copy), *copy.left_behind)}
        # The record goes last: whoever is interrupted here can begin again.
        for keys in (self._index.unused(sorted(doomed)), [key]):
            self._deletions.everywhere(keys)
        self._index.remove(key)  # a reader may have found it before it was deleted
        return bool(copies)

    def _key(self, session: SessionRef) -> bytes:
        return self._keys.record_key(session.tenant, session.id)
