"""Moves, pins and forgets sessions between their turns, and drops expired ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Final, Generic

import msgspec

from kvstore.ledger.claims import Claims
from kvstore.ledger.committer import Committer
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.notices import Notices, StoreNotice
from kvstore.ledger.pins import Pins
from kvstore.ledger.record import R
from kvstore.ledger.stack import TierStack
from kvstore.session import SessionRef, TierName
from kvstore.tiers.owed_deletions import Owed, OwedDeletions
from kvstore.workers import Workers

WAIT_S: Final = 30.0  # for running writes of the session


class Upkeep(Generic[R]):
    """Thread-safe. Every verb may wait for a commit of the session, or for a tier.

    Args:
        is_awaited: returns for a record key whether a save of that session is waiting.
    """

    def __init__(
        self,
        stack: TierStack,
        index: SessionIndex[R],
        committer: Committer[R],
        pins: Pins,
        claims: Claims,
        workers: Workers,
        notices: Notices,
        is_awaited: Callable[[bytes], bool],
    ) -> None:
        self._stack = stack
        self._index = index
        self._committer = committer
        self._pins = pins
        self._claims = claims
        self._workers = workers
        self._notices = notices
        self._is_awaited = is_awaited
        self._deletions = _Deletions(stack, index, index.clock)
        self._pinning = threading.Lock()  # checking the share and taking it is one step

    def tier_of(self, record: R) -> TierName | None:
        """Return the slowest tier that a restore must read; None if even the beginning is gone."""
        located = self._stack.locate(self._index.needed_keys(record))
        levels = [x for x in located.levels[: located.num_leading] if x is not None]
        return self._stack.name(max(levels)) if levels else None

    def resting_here(self) -> list[R]:
        """Sessions that can be restored here, without those whose record no tier has any more."""
        usable = self._index.usable()
        located = self._stack.locate([self._index.key(x) for x in usable])
        held = zip(usable, located.levels, strict=True)
        return [x for x, level in held if level is not None or located.down]

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier``, then drop the faster copies; returns its tier then.

        None if the session is not known. A pinned session, and one that ``tier`` cannot take as a
        whole, stays where it is.
        """
        level = self._stack.level(tier)
        with self._claims.claim(self._index.key_of(session)):  # else an older record could be sent
            record = self._index.find_anywhere(session.tenant, session.id)
            if record is None:
                return None
            sent = None
            if level and not record.pinned:
                sent = self._committer.send(level, record)
        if level and sent is not None and _is_taken(sent):
            self._drop_above(level, record)
        return self.tier_of(record)

    def _drop_above(self, level: int, record: R) -> None:
        key, blob_keys = self._index.key(record), self._index.blob_keys(record)
        with self._claims.claim(key):
            now = self._index.get(key)
            if now is None or now.pinned or self._index.blob_keys(now) != blob_keys:
                return  # forgotten, pinned or saved again meanwhile
            own = [key, *self._index.unshared(blob_keys, key)]
            for faster in range(level):
                self._stack.delete(faster, own)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Keep the session's blobs from eviction, or stop that.

        Has no effect on a session that was never saved. Raises ``PinLimit``: pinned sessions would
        take more than their share.
        """
        with self._claims.claim(self._index.key_of(session)), self._pinning:
            record = self._index.find_anywhere(session.tenant, session.id)
            if record is None or record.pinned == pinned:
                return
            if pinned:
                self._pins.check(self._committer.pin_of(record))
            self._committer.replace(msgspec.structs.replace(record, pinned=pinned))

    def forget(self, session: SessionRef) -> bool:
        """Remove every blob of the session that no other session here uses.

        False if the session was not known.
        """
        key = self._index.key_of(session)
        with self._claims.claim(key):
            return self._remove(key)

    def expire(self) -> None:
        """Forget expired sessions, report evicted ones, retry pending deletions."""
        for record in self._index.all():
            if self._index.is_over(record):
                self._let_lapse(self._index.key(record))
        self._notices.look()
        self._deletions.retry()

    def retry_deletions(self) -> None:
        """Try each pending deletion once more."""
        self._deletions.retry()

    def owes_deletions(self, level: int) -> bool:
        """True if sessions are still to be deleted from a tier that did not answer."""
        return self._deletions.is_owed(level)

    def retry_records(self, level: int) -> None:
        """Delete records that earlier lives owe a tier; call it before the tier's are read."""
        self._deletions.retry_records(level)

    def retry_inherited(self, level: int) -> None:
        """Delete other blobs that earlier lives owe a tier, once all its records are known."""
        self._deletions.retry_inherited(level)

    def _let_lapse(self, key: bytes) -> None:
        with self._claims.claim(key):
            record = self._index.get(key)
            # The session may have been used since the check, and the save of that turn may wait.
            if record is None or not self._index.is_over(record) or self._is_awaited(key):
                return
            self._remove(key)
            self._index.note_lapse(key)
        self._notices.report(StoreNotice(SessionRef(record.tenant, record.id, b""), "expired"))

    def _remove(self, key: bytes) -> bool:
        """Remove a claimed session."""
        self._committer.cancel(key)
        copies = self._index.everywhere(key)
        self._index.remove(key)
        self._workers.quiet(WAIT_S)  # blobs on their way to a faster tier
        self._pins.release(key)
        doomed = sorted({x for copy in copies for x in self._index.owned(copy)})
        # A reader may have found the record again meanwhile, since it is deleted last, so that an
        # interrupted caller can begin again. So the session itself does not count as a user.
        for keys in (self._index.unshared(doomed, key), [key]):
            self._deletions.everywhere(key, keys)
        self._index.remove(key)
        return bool(copies)


def _is_taken(sent: Future[bool]) -> bool:
    """Wait until a tier has all of a session; False if the tier failed, or took too long."""
    try:
        return sent.result(timeout=WAIT_S)
    except TimeoutError:
        return False


class _Deletions(Generic[R]):
    """Removes blobs from every tier, later also from one that is down now. Thread-safe."""

    def __init__(
        self, stack: TierStack, index: SessionIndex[R], clock: Callable[[], float]
    ) -> None:
        self._stack = stack
        self._index = index
        self._clock = clock
        self._owed = [OwedDeletions(stack.owed_file(level)) for level in range(len(stack))]
        self._lock = threading.Lock()
        self._retrying = threading.Lock()

    def everywhere(self, record_key: bytes, keys: Iterable[bytes]) -> None:
        """Delete some blobs of the session of ``record_key``, or its record."""
        owed = Owed(self._clock(), record_key, list(keys))
        for level in range(len(self._stack)):
            if not self._delete(level, owed.keys):
                with self._lock:
                    self._owed[level].add(owed)

    def retry(self) -> None:
        """Try each pending deletion of this life once more; one that fails again stays pending.

        Blobs that a session needs by now, and records of sessions that exist again, are kept.
        """
        with self._retrying:
            for level, owed in enumerate(self._owed):
                with self._lock:
                    taken = owed.take()
                done = 0
                while done < len(taken) and self._delete(level, self._still(taken[done].keys)):
                    done += 1
                with self._lock:
                    owed.put_back(taken[done:])
                    if done:
                        owed.settle()

    def _still(self, keys: Sequence[bytes]) -> list[bytes]:
        return [x for x in self._index.unused(keys) if self._index.get(x) is None]

    def retry_records(self, level: int) -> None:
        """Delete the records that earlier lives owe, before the tier's records are read.

        A deletion is dropped as a whole if the session was saved again since, here or by another
        engine.
        """
        owed = self._owed[level]
        with self._retrying:
            left = []
            for x in owed.inherited:
                key = x.record_key
                newest = self._index.get(key) or self._index.find_in(level, key)
                again = newest is not None and newest.last_used_s > x.at_s
                if not (again or (x.is_record and self._delete(level, x.keys))):
                    left.append(x)
            self._set_inherited(owed, left)

    def retry_inherited(self, level: int) -> None:
        """Delete other blobs that earlier lives owe, once all records of the tier are known."""
        owed = self._owed[level]
        with self._retrying:
            left = [x for x in owed.inherited if not self._delete(level, self._still(x.keys))]
            self._set_inherited(owed, left)

    def _set_inherited(self, owed: OwedDeletions, left: list[Owed]) -> None:
        if len(left) == len(owed.inherited):
            return
        with self._lock:
            owed.inherited = left
            owed.settle()

    def is_owed(self, level: int) -> bool:
        """True if a deletion must be made up for before the tier's records are read."""
        owed = self._owed[level]
        own = len(owed) > len(owed.inherited)
        return own or any(x.is_record for x in owed.inherited)

    def _delete(self, level: int, keys: Sequence[bytes]) -> bool:
        # In this order: a tier that finds its file damaged during the deletion puts it aside then.
        return self._stack.delete(level, keys) and self._stack.drop_quarantine(level)
