"""How much may be staged at once: read, verified, and in memory until vLLM loads it.

vLLM asks for every request that waits, in each step, so without a bound a long line of them would
have all its sessions in memory together, in every worker. It is decided here, for all ranks at
once: ranks that each chose for themselves could wait for each other.

First come, first served: if short sessions overtook, a long one might never find room. One that is
larger than all the room gets in when nobody else is there. Who waits is asked for again with vLLM's
next step, and who does not come back has to ``leave``: the others wait for it.
"""

from __future__ import annotations


class StagingRoom:
    """On vLLM's thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line: dict[str, None] = {}  # in the order of coming
        self._inside: dict[str, int] = {}  # bytes by request

    def enter(self, request_id: str, nbytes: int) -> bool:
        """False: not yet; its place in the line is kept."""
        self._line.setdefault(request_id)
        taken = sum(self._inside.values())
        fits = not self._inside or taken + nbytes <= self._max_bytes
        if next(iter(self._line)) != request_id or not fits:
            return False
        del self._line[request_id]
        self._inside[request_id] = nbytes
        return True

    def leave(self, request_id: str) -> None:
        """Out of the room or the line; nothing if it was in neither."""
        self._line.pop(request_id, None)
        self._inside.pop(request_id, None)
