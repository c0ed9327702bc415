"""What happens to a session between its turns: where it rests, moving it, pinning, forgetting."""

from __future__ import annotations

import threading
from typing import Final

import msgspec

from kvstore.committer import Committer
from kvstore.deletions import Deletions
from kvstore.departures import Departures
from kvstore.pins import Pins
from kvstore.records import SessionRecord, SessionRef, TierName
from kvstore.save_queue import SaveQueue
from kvstore.session_index import SessionIndex
from kvstore.session_keys import KeyMaker, left_behind_keys
from kvstore.tier_stack import TierStack
from kvstore.workers import Workers

WAIT_S: Final = 30.0  # for saves and writes of the session that are under way


class Upkeep:
    """Thread-safe. Every verb may wait for a running save of the session, or for a tier."""

    def __init__(
        self,
        stack: TierStack,
        queue: SaveQueue,
        committer: Committer,
        index: SessionIndex,
        keys: KeyMaker,
        pins: Pins,
        workers: Workers,
        departures: Departures,
    ) -> None:
        self._stack = stack
        self._queue = queue
        self._committer = committer
        self._index = index
        self._keys = keys
        self._pins = pins
        self._workers = workers
        self._departures = departures
        self._pinning = threading.Lock()  # the share is looked at and taken in one step
        self._deletions = Deletions(stack)

    def tier_of(self, record: SessionRecord) -> TierName | None:
        """The fastest tier holding all of it, else the slowest that its leading part needs."""
        names = self._keys.listed(record)
        for i in range(len(self._stack)):
            if all(self._stack.holds(i, names)):
                return self._stack.name(i)
        located = self._stack.locate(names)
        needed = [x for x in located.places[: located.num_leading] if x is not None]
        return self._stack.name(max(needed)) if needed else None

    def resting_here(self) -> list[SessionRecord]:
        """Sessions of this model and codec whose record is in a local tier."""
        usable = [x for x in self._index.all() if self._index.is_usable(x)]
        keys = [self._keys.record_key(x) for x in usable]
        held = [self._stack.holds(place, keys) for place in self._stack.local]
        return [x for x, *there in zip(usable, *held, strict=True) if any(there)]

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier``, then drop the faster copies; where it rests now."""
        self._queue.wait_settled(self._key(session), WAIT_S)
        record = self._index.find(session)
        if record is None:
            return None
        place = self._stack.place(tier)
        if place and not record.pinned and self._brought(record, place):
            names = self._keys.listed(record)
            shared = self._index.used_by_others(record, names)
            mine = [self._keys.record_key(record), *(x for x in names if x not in shared)]
            for faster in range(place):
                self._stack.delete(faster, mine)
        return self.tier_of(record)

    def _brought(self, record: SessionRecord, place: int) -> bool:
        try:
            return self._committer.send(place, record).result(timeout=WAIT_S)
        except TimeoutError:
            return False

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Nothing happens for a session that was never saved. Raises ``PinLimit``."""
        key = self._key(session)
        self._queue.wait_settled(key, WAIT_S)
        with self._queue.claim(key), self._pinning:
            record = self._index.find(session)
            if record is not None and record.pinned != pinned:
                if pinned:
                    self._pins.check(self._committer.pin_of(record))
                self._committer.replace(msgspec.structs.replace(record, pinned=pinned))

    def forget(self, session: SessionRef) -> bool:
        """Remove every blob of the session that no other session here uses."""
        key = self._key(session)
        with self._queue.claim(key, drop_waiting=True) as dropped:
            self._committer.cancel(key)
            self._workers.quiet(WAIT_S)  # blobs on their way to a faster tier
            copies = self._index.everywhere(key)
            self._index.drop(key)
            self._pins.release(key)
            doomed = {x for copy in copies for x in self._own_blobs(copy)}
            # The record goes last: whoever is interrupted here can begin again.
            for keys in (sorted(doomed), [key]):
                self._deletions.everywhere(keys)
            self._index.drop(key)  # a reader may have found the record before it was deleted
        for on_done in dropped.on_done if dropped else ():
            on_done(None)
        return bool(copies) or dropped is not None

    def expire(self) -> None:
        """Forget what nobody came back to, tell of what was evicted, do deletions still owed."""
        for record in self._index.all():
            if self._index.lapsed(record):
                session = SessionRef(record.tenant, record.id, b"")
                self.forget(session)
                self._index.expire(self._keys.record_key(record))
                self._departures.tell(session)
        self._departures.look()
        self._deletions.retry()

    def _own_blobs(self, record: SessionRecord) -> set[bytes]:
        names = {*self._keys.listed(record), *left_behind_keys(record)}
        return names - self._index.used_by_others(record, names)

    def _key(self, session: SessionRef) -> bytes:
        return self._keys.space.record_key(session.tenant, session.id)
