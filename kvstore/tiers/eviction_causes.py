"""Why blobs were evicted, for as long as a caller may ask.

A scan of the sessions comes a while later, when a blob is long gone: a tier remembers of the last
few thousand evictions why they happened. Not thread-safe: ``RecencyIndex`` owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

# There was no room for it; its tenant held more than is guaranteed to it, and another one wrote,
# or had what was older but guaranteed.
EvictionCause: TypeAlias = Literal["budget", "share"]
MAX_REMEMBERED: Final = 1 << 14


class EvictionCauses:
    """The last evictions, by key; the oldest are forgotten."""

    def __init__(self) -> None:
        self._causes: OrderedDict[bytes, EvictionCause] = OrderedDict()

    def remember(self, key: bytes, cause: EvictionCause) -> None:
        """Note why a key was evicted."""
        self._causes[key] = cause
        self._causes.move_to_end(key)
        if len(self._causes) > MAX_REMEMBERED:
            self._causes.popitem(last=False)

    def came_back(self, key: bytes) -> None:
        """Note that the key is held again."""
        self._causes.pop(key, None)

    def of(self, keys: Iterable[bytes]) -> list[EvictionCause | None]:
        """Say why each was evicted; None: it was not, or too long ago."""
        return [self._causes.get(key) for key in keys]
