"""The replica that had each session last."""

from __future__ import annotations

from collections import OrderedDict

from engines.wire import SessionRef
from kvstore.session import SessionName


class Homes:
    """The homes that this gateway has seen; those used longest ago are dropped first.

    A home is a belief: a wrong one costs a restore, or a prefill.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._homes: OrderedDict[SessionName, str] = OrderedDict()

    def get(self, session: SessionRef) -> str | None:
        """Return the name of the replica that had the session last; None if that is not known."""
        return self._homes.get(session.name)

    def put(self, session: SessionRef, replica: str) -> None:
        """Note that a replica has the session."""
        key = session.name
        self._homes[key] = replica
        self._homes.move_to_end(key)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def drop(self, session: SessionRef) -> None:
        """Note that the session is no more."""
        self._homes.pop(session.name, None)
