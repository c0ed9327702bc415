"""Telling whoever listens that a session can no longer be restored.

A session leaves in two ways: its time runs out, which ``upkeep`` says at once, or the tiers evicted
it to the last blob. Tiers know nothing of sessions, so for the second the sessions are looked
through now and then, if anything was evicted since. What a Redis server evicts by itself is noticed
only along with that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.records import SessionRecord, SessionRef
from kvstore.session_index import SessionIndex
from kvstore.session_keys import KeyMaker
from kvstore.tier_stack import TierStack

OnGone = Callable[[SessionRef], None]

_log = logging.getLogger(__name__)


class Departures:
    """On the saving thread, so that no save of a session comes in between."""

    def __init__(self, stack: TierStack, index: SessionIndex, keys: KeyMaker) -> None:
        self._stack = stack
        self._index = index
        self._keys = keys
        self._listener: OnGone | None = None
        self._num_evictions = 0
        self._missing: set[bytes] = set()  # record keys of sessions that were not found last time
        self._told: set[bytes] = set()

    def listen(self, on_gone: OnGone) -> None:
        self._listener = on_gone

    def tell(self, record: SessionRecord) -> None:
        """The listener gets a reference without a salt: the store does not keep salts."""
        if self._listener is None:
            return
        try:
            self._listener(SessionRef(record.tenant, record.id, b""))
        except Exception:  # the listener's own defect must not end the saving thread
            _log.exception("a listener for sessions that are gone failed")

    def look(self) -> None:
        """Tell of sessions that were evicted since the last look but one.

        Missed twice, because right after a save the slower tiers may still be writing.
        """
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

    def _gone(self) -> dict[bytes, SessionRecord] | None:
        """Sessions without even their first blob; None while a tier does not say."""
        usable = [(x, self._keys.listed(x)) for x in self._index.all() if self._index.is_usable(x)]
        firsts = [(x, names[0]) for x, names in usable if names]
        located = self._stack.locate([first for _, first in firsts])
        if located.down:
            return None
        places = zip(firsts, located.places, strict=True)
        return {self._keys.record_key(x): x for (x, _), place in places if place is None}
