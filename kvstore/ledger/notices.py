"""Reports to a listener that a session left the store or a tier of it, or takes less room.

A session leaves in two ways. Either it expires, which the ledger reports at once. Or the tiers
evicted it, completely or from a faster tier only. Tiers do not know sessions, so all of them are
checked now and then, if anything was evicted since. Evictions by a Redis server itself are noticed
only in such a check.
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
    """A change of a session's stored copy, which no turn or verb of the session made."""

    session: SessionRef  # without a salt, since the store does not keep salts
    # The tier's cause; or it was not used in time; or what was exact takes less room now.
    why: EvictionCause | Literal["expired", "packed"]
    is_gone: bool = True  # False: it is stored elsewhere, or otherwise


OnNotice = Callable[[StoreNotice], None]

_log = logging.getLogger(__name__)


class Restorable(NamedTuple):
    """A session that the store would restore, and the blobs that show where it is stored."""

    record_key: bytes
    session: SessionRef  # without a salt, since the store does not keep salts
    first_blob: bytes  # the oldest state, or the first chunk: evicted last
    last_blob: bytes  # the newest state, or the last chunk: evicted first


class Notices:
    """Thread-safe."""

    def __init__(self, stack: TierStack, restorable: Callable[[], Iterable[Restorable]]) -> None:
        self._stack = stack
        self._restorable = restorable
        self._listener: OnNotice | None = None
        self._looking = threading.Lock()
        self._num_evictions = 0
        self._missing: set[bytes] = set()  # record keys of sessions that were not found last time
        self._reported: set[bytes] = set()
        self._levels: dict[bytes, int] = {}  # by record key, of the last blob when last seen
        self._has_looked = False  # the first look only notes where earlier sessions are

    def listen(self, on_notice: OnNotice) -> None:
        """Call ``on_notice`` from now on; sessions that are already missing are not reported."""
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
        """Report sessions that were evicted since the last look, or the one before it.

        A session is reported only when missed twice, because right after a save the slower tiers
        may still be writing.
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
        """Report sessions whose end is in a slower tier than before."""
        now = {x.record_key: (x, i) for x, i in zip(known, levels, strict=True) if i is not None}
        for key, (session, level) in now.items():
            was = self._levels.get(key, 0)
            if self._has_looked and level > was:
                why = self._stack.why_evicted(session.last_blob, range(level - 1, was - 1, -1))
                self.report(StoreNotice(session.session, why or "budget", is_gone=False))
        self._levels = {key: level for key, (_, level) in now.items()}
        self._has_looked = True
