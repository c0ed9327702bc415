"""Telling whoever listens that a session can no longer be restored.

A session leaves in two ways: its time runs out, which upkeep says at once, or the tiers evicted it
to the last blob. Tiers know nothing of sessions, so for the second the sessions are looked through
now and then, if anything was evicted since. What a Redis server evicts by itself is noticed only
along with that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvstore.ledger.stack import TierStack
from kvstore.session import SessionRef

OnGone = Callable[[SessionRef], None]

_log = logging.getLogger(__name__)


class Restorable(NamedTuple):
    """A session that the store would restore, and the blob without which it cannot."""

    record_key: bytes
    session: SessionRef  # without a salt: the store does not keep salts
    first_blob: bytes


class EvictionNotices:
    """Thread-safe."""

    def __init__(self, stack: TierStack, restorable: Callable[[], Iterable[Restorable]]) -> None:
        self._stack = stack
        self._restorable = restorable
        self._listener: OnGone | None = None
        self._looking = threading.Lock()
        self._num_evictions = 0
        self._missing: set[bytes] = set()  # record keys of sessions that were not found last time
        self._told: set[bytes] = set()

    def listen(self, on_gone: OnGone) -> None:
        self._listener = on_gone

    def tell(self, session: SessionRef) -> None:
        if self._listener is None:
            return
        try:
            self._listener(session)
        except Exception:  # the listener's own defect must not end the thread that looks
            _log.exception("a listener for sessions that are gone failed")

    def look(self) -> None:
        """Tell of sessions that were evicted since the last look but one.

        Missed twice, because right after a save the slower tiers may still be writing.
        """
        with self._looking:
            self._look()

    def _look(self) -> None:
        num_evictions = sum(x.evictions for x in self._stack.stats())
        if num_evictions == self._num_evictions and self._missing <= self._told:
            return
        gone = self._gone()
        if gone is None:
            return
        self._num_evictions = num_evictions
        sure = self._missing.intersection(gone)
        for key in sure - self._told:
            self.tell(gone[key])
        self._told = self._told.intersection(gone) | sure
        self._missing = set(gone)

    def _gone(self) -> dict[bytes, SessionRef] | None:
        """Sessions without even their first blob; None while a tier does not say."""
        known = list(self._restorable())
        located = self._stack.locate([x.first_blob for x in known])
        if located.down:
            return None
        levels = zip(known, located.levels, strict=True)
        return {x.record_key: x.session for x, level in levels if level is None}
