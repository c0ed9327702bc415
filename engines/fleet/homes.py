"""The replica that had each session last."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from engines.wire import SessionRef


class Homes(Protocol):
    """Knows the home of sessions. It is a belief: a wrong one costs a restore, or a prefill."""

    def get(self, session: SessionRef) -> str | None:
        """Return the name of the replica that had the session last; None if that is not known."""

    def put(self, session: SessionRef, replica: str) -> None:
        """Note that a replica has the session now."""

    def drop(self, session: SessionRef) -> None:
        """Note that the session is no more."""


class LastHomes:
    """The homes that this gateway has seen; those used longest ago are dropped first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def get(self, session: SessionRef) -> str | None:
        return self._homes.get((session.tenant, session.id))

    def put(self, session: SessionRef, replica: str) -> None:
        key = session.tenant, session.id
        self._homes[key] = replica
        self._homes.move_to_end(key)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def drop(self, session: SessionRef) -> None:
        self._homes.pop((session.tenant, session.id), None)
