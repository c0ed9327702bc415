"""The causes of recent evictions.

Sessions are checked some time after an eviction, when the blob is long gone. So a tier remembers
the causes of the last few thousand evictions. Not thread-safe: ``RecencyIndex`` owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

# "budget": there was no space for it. "share": its tenant held more than is guaranteed to it, and
# another tenant wrote, or had older bytes that were guaranteed.
EvictionCause: TypeAlias = Literal["budget", "share"]
MAX_REMEMBERED: Final = 1 << 14


class EvictionCauses:
    """The last evictions, by key; older ones are forgotten."""

    def __init__(self) -> None:
        self._causes: OrderedDict[bytes, EvictionCause] = OrderedDict()

    def remember(self, key: bytes, cause: EvictionCause) -> None:
        """Record why a key was evicted."""
        self._causes[key] = cause
        self._causes.move_to_end(key)
        if len(self._causes) > MAX_REMEMBERED:
            self._causes.popitem(last=False)

    def came_back(self, key: bytes) -> None:
        """Record that the key is held again."""
        self._causes.pop(key, None)

    def of(self, keys: Iterable[bytes]) -> list[EvictionCause | None]:
        """Return for each key why it was evicted; None: it was not, or too long ago."""
        return [self._causes.get(key) for key in keys]
