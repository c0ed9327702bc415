"""Deletions that a replica is still to do: in order, and bounded for all and for each tenant."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from math import inf
from typing import Final

from engines.base import SessionRef
from kvstore.session import SessionName

MAX_OWED: Final = 10_000  # deletions that a replica that is away is still to do
MAX_OWED_OF_TENANT: Final = MAX_OWED // 4  # of these


class ReplicaDeletions:
    """Sessions that are to be deleted, the oldest deletion first. A step takes constant time."""

    def __init__(self) -> None:
        self._all: OrderedDict[SessionName, tuple[SessionRef, float]] = OrderedDict()
        self._of: defaultdict[str, OrderedDict[SessionName, None]] = defaultdict(OrderedDict)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, key: object) -> bool:
        return key in self._all

    def __iter__(self) -> Iterator[SessionRef]:
        return (session for session, _ in list(self._all.values()))

    def has_room(self, tenant: str) -> bool:
        """Say whether one more of this tenant is within the bounds."""
        return len(self._all) < MAX_OWED and self._num_of(tenant) < MAX_OWED_OF_TENANT

    def _num_of(self, tenant: str) -> int:
        return len(self._of[tenant]) if tenant in self._of else 0

    def make_room(self, tenant: str) -> None:
        """Drop the oldest until one more of this tenant is within the bounds."""
        while self._num_of(tenant) >= MAX_OWED_OF_TENANT:
            self._drop(next(iter(self._of[tenant])))
        while len(self._all) >= MAX_OWED:
            self._drop(next(iter(self._all)))

    def add(self, session: SessionRef, until: float = inf) -> None:
        """Add a deletion as the latest, even beyond the bounds.

        ``until``: the moment at which ``expire`` drops it; never before that of an older one.
        """
        self.discard(session)
        key = session.name
        self._all[key] = session, until
        self._of[session.tenant][key] = None

    def discard(self, session: SessionRef) -> None:
        """Take a session's deletion out, if there is one."""
        if session.name in self._all:
            self._drop(session.name)

    def _drop(self, key: SessionName) -> None:
        del self._all[key]
        of_tenant = self._of[key[0]]
        del of_tenant[key]
        if not of_tenant:
            del self._of[key[0]]

    def expire(self, now: float) -> None:
        """Drop those whose time is over."""
        while self._all and next(iter(self._all.values()))[1] <= now:
            self._drop(next(iter(self._all)))
