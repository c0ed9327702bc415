"""Bounds how many streams of events a tenant has open at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import Failure, Refused

AGAIN_S = 5.0


class StreamPlaces:
    """The open streams of each tenant. Belongs to the event loop."""

    def __init__(self, most: int) -> None:
        """``most``: of one tenant."""
        self._most = most
        self._open: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises ``Refused`` (429) if the tenant has none left."""
        if self._open[tenant] >= self._most:
            message = f"{self._most} streams of events are open already; close one."
            raise Refused(Failure(429, message, None, "too_many_streams", AGAIN_S))
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
