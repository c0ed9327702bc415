"""The live KV of a simulated engine: whole sessions, by order of last use."""

from __future__ import annotations

from collections import OrderedDict


class LiveSessions:
    """Sizes of sessions; those that are answered now stay.

    Args:
        capacity_bytes: of all of them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._running: set[bytes] = set()
        self.nbytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def run(self, key: bytes) -> None:
        """Keep a session from now on until it is saved."""
        self._running.add(key)

    def add(self, key: bytes, nbytes: int) -> list[bytes]:
        """Take in a session that was saved; return those that have no room any more."""
        self.remove(key)
        self._sizes[key] = nbytes
        self.nbytes += nbytes
        return self.shrink(self._capacity_bytes)

    def shrink(self, capacity_bytes: int) -> list[bytes]:
        """Let go of the longest unused until the others fit; return them."""
        gone = []
        for key in [x for x in self._sizes if x not in self._running]:
            if self.nbytes <= capacity_bytes:
                break
            self.remove(key)
            gone.append(key)
        return gone

    def remove(self, key: bytes) -> None:
        """Let go of a session."""
        self.nbytes -= self._sizes.pop(key, 0)
        self._running.discard(key)
