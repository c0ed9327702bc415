"""Bounds what is staged at once: read, verified, and held in memory until vLLM loads it.

vLLM asks for every waiting request in each step, so without a bound a long line of requests would
have all its sessions in memory together, in every worker. The bound is kept here, for all ranks at
once: ranks that each chose for themselves could wait for each other.

First come, first served: if short sessions overtook, a long one might never find room. A session
larger than the whole budget gets in when no other is there. A request that waits is asked for
again in vLLM's next step; one that will not come back has to ``release``, or the others wait for
it.
"""

from __future__ import annotations


class StagingBudget:
    """Bytes reserved by requests, and the line of those that wait. On vLLM's thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[str, None] = {}  # in the order of arrival
        self._reserved: dict[str, int] = {}  # bytes by request

    def reserve(self, request_id: str, nbytes: int) -> bool:
        """Reserve the bytes, or join the line and return False; a request keeps its turn there."""
        self._waiting.setdefault(request_id)
        taken = sum(self._reserved.values())
        fits = not self._reserved or taken + nbytes <= self._max_bytes
        if next(iter(self._waiting)) != request_id or not fits:
            return False
        del self._waiting[request_id]
        self._reserved[request_id] = nbytes
        return True

    def release(self, request_id: str) -> None:
        """Give back what the request has reserved, or its turn in the line; else do nothing."""
        self._waiting.pop(request_id, None)
        self._reserved.pop(request_id, None)
