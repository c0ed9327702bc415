"""Keeps an engine's entry on Redis, and reports the differences that keep it apart from others.

No request waits for it: a separate thread asks the server every ``BEAT_S`` seconds. If the server
does not answer, the last result is forgotten after a lease. The result is only a belief, so losing
it costs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

from kvstore.errors import TierUnavailable
from kvstore.members.differences import APART, SEED, compared
from kvstore.members.entry import ID_BYTES, EntrySeal
from kvstore.members.facts import Facts
from kvstore.members.roster import LEASE_S, Roster
from kvstore.periodic import Periodic
from kvstore.session import MissReason
from kvstore.stats import Members
from kvstore.tiers.redis_server.link import RedisLink

BEAT_S: Final = 15.0

_log = logging.getLogger(__name__)


class Membership:
    """Implements ``Company`` on a Redis server.

    Args:
        link: owned by this object.
        facts: returns this engine's present facts; called on the thread.
    """

    def __init__(
        self,
        link: RedisLink,
        secret: bytes,
        facts: Callable[[], Facts],
        monotonic: Callable[[], float] = time.monotonic,
        beat_s: float = BEAT_S,
    ) -> None:
        self._link = link
        self._roster = Roster(link, EntrySeal(secret))
        self._facts = facts
        self._monotonic = monotonic
        self._id = secrets.token_bytes(ID_BYTES)
        self._members: Members | None = None  # replaced as a whole
        self._seen_at = 0.0
        self._said: set[str] = set()
        self._thread = Periodic(self._beat, beat_s, "kvstore-members", at_once=True)

    def report(self) -> Members | None:
        if self._monotonic() - self._seen_at > LEASE_S:
            return None
        return self._members

    def why_unknown(self) -> MissReason:
        return "foreign-secret" if self._kinds() & APART else "never-stored"

    def why_diverged(self) -> MissReason:
        return "foreign-seed" if SEED in self._kinds() else "diverged"

    def _kinds(self) -> set[str]:
        members = self.report()
        return {x.kind for x in members.differing} if members else set()

    def close(self) -> None:
        self._thread.close()
        with contextlib.suppress(TierUnavailable):  # the lease ends by itself
            self._roster.leave(self._id)
        self._link.close()

    def _beat(self) -> None:
        facts = self._facts()
        try:
            others = [x for x in self._roster.look() if x.id != self._id]
            self._members, self._seen_at = compared(facts, others), self._monotonic()
            self._say(self._members)
            self._roster.keep(self._id, facts)
        except TierUnavailable:
            return  # the link has counted and logged it

    def _say(self, members: Members) -> None:
        """Log each kind of difference when it appears, and when it is gone."""
        kinds = {x.kind for x in members.differing}
        for each in members.differing:
            if each.kind not in self._said:
                _log.warning("%s", each.text)
        for kind in self._said - kinds:
            _log.info("no engine on this Redis differs in this any more: %s", kind)
        self._said = kinds
