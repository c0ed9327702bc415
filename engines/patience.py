"""Waits that must not last for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS_PER_LIMIT = 4


class Patience:
    """Notices a wait that lasts too long without a timer for every wait.

    ``moves`` is counted up when a wait begins and when it ends, so it is odd during a wait. A look
    now and then tells whether it is still the same wait. This costs two additions per wait, where
    a timer would cost as much as relaying a chunk.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        """``give_up`` is called once, on the event loop, during a wait of ``limit_s`` seconds (or
        up to a quarter more)."""
        self.moves = 0
        self._give_up = give_up
        self._gap_s = limit_s / LOOKS_PER_LIMIT
        self._seen = -1
        self._num_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._gap_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        same_wait = self.moves % 2 == 1 and self.moves == self._seen
        self._num_looks = self._num_looks + 1 if same_wait else 0
        self._seen = self.moves
        if self._num_looks == LOOKS_PER_LIMIT:
            self._give_up()
        else:
            self._timer = self._loop.call_later(self._gap_s, self._look)
