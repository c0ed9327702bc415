"""Reports to a listener that a session expired, was evicted, or was packed to fewer bytes.

The ledger reports an expired session at once, and a packed one when it was packed. An eviction has
to be found: the tiers know blobs, not sessions. So all sessions are looked up at intervals, if a
tier has evicted a blob since. What a Redis server evicts is found only by such a look-up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from kvstore.ledger.stack import TierStack
from kvstore.session import SessionRef
from kvstore.tiers.base import EvictionCause


class StoreNotice(NamedTuple):
    """A change of a session's stored copy that no turn and no request for the session caused."""

    session: SessionRef  # without a salt, since the store does not keep salts
    # Why a tier evicted it; "expired": unused for too long; "packed": exact blobs were packed.
    why: EvictionCause | Literal["expired", "packed"]
    is_gone: bool = True  # False: it is still stored, in a slower tier or packed


OnNotice = Callable[[StoreNotice], None]

_log = logging.getLogger(__name__)


class Restorable(NamedTuple):
    """A session that the store can restore, and the keys of blobs that show where it is stored."""

    record_key: bytes
    session: SessionRef  # without a salt, since the store does not keep salts
    first_blob: bytes  # the oldest state, or the first chunk: evicted last
    last_blob: bytes  # the newest state, or the last chunk: evicted first


class Notices:
    """Finds evicted sessions and reports to the listener. Thread-safe.

    Args:
        restorable: returns the sessions to look up.
    """

    def __init__(self, stack: TierStack, restorable: Callable[[], Iterable[Restorable]]) -> None:
        self._stack = stack
        self._restorable = restorable
        self._listener: OnNotice | None = None
        self._looking = threading.Lock()
        self._num_evictions = 0
        self._missing: set[bytes] = set()  # record keys of sessions that were not found last time
        self._reported: set[bytes] = set()
        self._levels: dict[bytes, int] = {}  # by record key: level of the last blob when last seen
        self._has_looked = False  # the first look reports nothing; it notes where sessions are

    def listen(self, on_notice: OnNotice) -> None:
        """Report to ``on_notice`` from now on. Sessions that are missing already are left out."""
        self._listener = on_notice
        self.look()

    def report(self, notice: StoreNotice) -> None:
        if self._listener is None:
            return
        try:
            self._listener(notice)
        except Exception:  # the listener's own defect must not end the thread that looks
            _log.exception("a listener for changes of stored sessions failed")

    def look(self) -> None:
        """Report the sessions that were evicted, at the second look that misses them.

        At the first one the slower tiers may still be writing a session that was just saved.
        """
        with self._looking:
            self._look()

    def _look(self) -> None:
        num_evictions = sum(x.evictions for x in self._stack.stats())
        unchanged = num_evictions == self._num_evictions and self._missing <= self._reported
        if unchanged and self._has_looked:
            return
        is_first = not self._has_looked
        gone = self._gone()
        if gone is None:
            return
        if is_first:  # sessions that an earlier process left unusable were not evicted by this one
            self._reported = set(gone)
        self._num_evictions = num_evictions
        sure = self._missing.intersection(gone)
        slowest_first = range(len(self._stack) - 1, -1, -1)
        for key in sure - self._reported:
            why = self._stack.why_evicted(gone[key].first_blob, slowest_first) or "budget"
            self.report(StoreNotice(gone[key].session, why))
        self._reported = self._reported.intersection(gone) | sure
        self._missing = set(gone)

    def _gone(self) -> dict[bytes, Restorable] | None:
        """Find sessions without even their first blob; None while a tier does not answer."""
        known = list(self._restorable())
        located = self._stack.locate([key for x in known for key in (x.first_blob, x.last_blob)])
        if located.down:
            return None
        self._note_levels(known, located.levels[1::2])
        levels = zip(known, located.levels[::2], strict=True)
        return {x.record_key: x for x, level in levels if level is None}

    def _note_levels(self, known: Sequence[Restorable], levels: Sequence[int | None]) -> None:
        """Report the sessions whose last blob is in a slower tier than before."""
        now = {x.record_key: (x, i) for x, i in zip(known, levels, strict=True) if i is not None}
        for key, (session, level) in now.items():
            was = self._levels.get(key, 0)
            if self._has_looked and level > was:
                why = self._stack.why_evicted(session.last_blob, range(level - 1, was - 1, -1))
                self.report(StoreNotice(session.session, why or "budget", is_gone=False))
        self._levels = {key: level for key, (_, level) in now.items()}
        self._has_looked = True
