"""Bounds the staged bytes: blobs that were read, verified and are held until vLLM loads them.

vLLM calls ``match`` for every waiting request in each step, so without a bound all sessions of a
long queue of requests would be in memory together, in every worker. One bound is kept here for all
ranks: if each rank chose for itself, ranks could wait for each other.

The order is first come, first served: if short sessions could overtake, a long one might never find
room. A session larger than the whole budget is admitted when no other is staged. vLLM asks again
for a waiting request in its next step. A request that will not ask again must call ``release``;
otherwise the others would wait for it.
"""

from __future__ import annotations


class StagingBudget:
    """The bytes reserved by requests, and the queue of waiting ones. On vLLM's thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[str, None] = {}  # in the order of arrival
        self._reserved: dict[str, int] = {}  # bytes by request

    def reserve(self, request_id: str, nbytes: int) -> bool:
        """Reserve the bytes, or return False and keep the request's place in the queue."""
        self._waiting.setdefault(request_id)
        taken = sum(self._reserved.values())
        fits = not self._reserved or taken + nbytes <= self._max_bytes
        if next(iter(self._waiting)) != request_id or not fits:
            return False
        del self._waiting[request_id]
        self._reserved[request_id] = nbytes
        return True

    def release(self, request_id: str) -> None:
        """Release the request's bytes or its place in the queue, if it has any."""
        self._waiting.pop(request_id, None)
        self._reserved.pop(request_id, None)
