"""The time by which an answer must have ended, which may be put off while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Deadline:
    """A time of the event loop's clock, in seconds. Belongs to the event loop."""

    def __init__(self, at: float) -> None:
        self.at = at
        self._limit: asyncio.Timeout | None = None  # what was entered last

    def put_off(self, at: float) -> None:
        """Let what runs go on until ``at``, if that is later."""
        self.at = max(self.at, at)
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self.at)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Raise ``TimeoutError`` inside the context at that time.

        A context within such a one takes its place, and ends by itself.
        """
        if self._limit is not None:
            self._limit.reschedule(None)
        async with asyncio.timeout_at(self.at) as self._limit:
            try:
                yield
            finally:
                self._limit = None
