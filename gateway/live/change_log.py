"""Knows which sessions changed since when, with one entry for each session however often it did."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
MAX_ENTRIES = 200_000


class ChangeLog(Generic[K]):
    """Names, each with the number of the moment in which it last changed.

    A reader that was last served at moment n asks for the changes after n, so one that is slow or
    comes back gets each session once, as it is now: nothing is queued for any reader.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._moments: OrderedDict[K, int] = OrderedDict()  # the latest last
        self._complete_since = 0

    def mark(self, name: K, moment: int) -> None:
        """Note a change; moments never fall."""
        self._moments[name] = moment
        self._moments.move_to_end(name)
        while len(self._moments) > self._max_entries:
            _, self._complete_since = self._moments.popitem(last=False)

    def knows(self, moment: int) -> bool:
        """Say whether all that changed after ``moment`` is still known."""
        return moment >= self._complete_since

    def since(self, moment: int) -> list[K]:
        """Return what changed after ``moment``, the earliest change first."""
        found = []
        for name in reversed(self._moments):
            if self._moments[name] <= moment:
                break
            found.append(name)
        found.reverse()
        return found
