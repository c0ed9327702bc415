"""The last uses of blobs before those of an engine's earlier lives are entered in the index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

MOST_KEYS: Final = 10_000


class EarlyUses:
    """Keys in the order of their last use, so that a blob can be used before it is entered.

    Those of this life are remembered, too: their order among the others is known only here. Beyond
    ``MOST_KEYS`` the longest unused are dropped. Not thread-safe.
    """

    def __init__(self, remembers: bool = True) -> None:
        self._last: OrderedDict[bytes, int] = OrderedDict()  # grows with every use
        self._num_uses = 0
        self._remembers = remembers

    def note(self, keys: Iterable[bytes]) -> None:
        """Remember that a chain was just used; its first key counts as the most recent."""
        if not self._remembers:
            return
        for key in reversed(list(keys)):
            self._num_uses += 1
            self._last[key] = self._num_uses
            self._last.move_to_end(key)
        while len(self._last) > MOST_KEYS:
            self._last.popitem(last=False)

    def among(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of ``keys`` that were used, the most recent first."""
        return sorted((x for x in keys if x in self._last), key=self._last.__getitem__)[::-1]

    def all(self) -> Sequence[bytes]:
        """Return all keys, the most recent first."""
        return list(reversed(self._last))

    def end(self) -> None:
        """Forget them, and remember none from now on."""
        self._remembers = False
        self._last.clear()
