"""A limit on single waits that costs almost nothing per wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS_PER_LIMIT = 4


class StallWatchdog:
    """Notices a wait that lasts too long, without a timer for every wait.

    Its user adds one to ``edges`` when a wait begins and when it ends, so it is odd during a wait.
    A look now and then shows whether it is still the same wait. This costs two additions per wait,
    where a timer would cost as much as relaying a chunk.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        """Start to look.

        Args:
            limit_s: the longest wait, in seconds; it is noticed up to a quarter later.
            give_up: called once, on the event loop, during such a wait.
        """
        self.edges = 0
        self._give_up = give_up
        self._gap_s = limit_s / LOOKS_PER_LIMIT
        self._seen = -1
        self._num_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._gap_s, self._look)

    def stop(self) -> None:
        """Look no more; ``give_up`` is not called any more."""
        self._timer.cancel()

    def _look(self) -> None:
        same_wait = self.edges % 2 == 1 and self.edges == self._seen
        self._num_looks = self._num_looks + 1 if same_wait else 0
        self._seen = self.edges
        if self._num_looks == LOOKS_PER_LIMIT:
            self._give_up()
        else:
            self._timer = self._loop.call_later(self._gap_s, self._look)
