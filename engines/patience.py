"""Waits that must not last for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Patience:
    """Notices a wait that lasts too long, with one timer per period instead of one per chunk."""

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        """``give_up`` is called once, on the event loop, during the wait that lasts too long."""
        self._limit_s = limit_s
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit_s, self._look)
        self._waits_since: float | None = None

    def wait_begins(self) -> None:
        self._waits_since = self._loop.time()

    def wait_ends(self) -> None:
        self._waits_since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._waits_since is None else self._waits_since
        if now - since >= self._limit_s:
            self._give_up()
        else:
            self._timer = self._loop.call_at(since + self._limit_s, self._look)
