"""Removing blobs from every tier, also from one that is down just now."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.tier_stack import TierStack

MAX_OWED: Final = 1024


class Deletions:
    """Thread-safe."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        # What a tier could not be asked to delete, for when it is back.
        self._owed: deque[tuple[int, list[bytes]]] = deque(maxlen=MAX_OWED)

    def everywhere(self, keys: Sequence[bytes]) -> None:
        for place in range(len(self._stack)):
            self._delete(place, list(keys))

    def retry(self) -> None:
        """Once each; what still fails stays owed."""
        for _ in range(len(self._owed)):
            self._delete(*self._owed.popleft())

    def _delete(self, place: int, keys: list[bytes]) -> None:
        if not self._stack.delete(place, keys):
            self._owed.append((place, keys))
