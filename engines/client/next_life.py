"""The wait for an engine that ended while a request was with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

POLL_S = 0.05
# The two connections of an engine that ends are closed together, but not heard of in one order.
NOTICED_S = 0.2


class NextLife:
    """Says whether the engine that was there when this was made has ended, and awaits the next.

    It has if its control connection was lost, whether its process ended or was given up as hung.
    """

    def __init__(
        self,
        engine: Callable[[], object],
        wait_s: float,
        no_hope: Callable[[], bool],
        there: Callable[[], bool] | None = None,
    ) -> None:
        """Remember the engine of now.

        Args:
            engine: returns one object for as long as the control connection lasts, None without.
            wait_s: the longest wait for the next one, in seconds.
            no_hope: says that none will come.
            there: says that one can be asked, once the one of now has ended; None = its next life.
        """
        self._engine = engine
        self._then = engine()
        self._wait_s = wait_s
        self._no_hope = no_hope
        self._there = there or (lambda: engine() is not None)

    @property
    def ended(self) -> bool:
        """True once the engine of then has ended."""
        return self._engine() is not self._then

    async def ready(self) -> bool:
        """Wait until the engine has ended and one is there again; False if not in time."""
        loop = asyncio.get_running_loop()
        noticed, end = loop.time() + NOTICED_S, loop.time() + self._wait_s
        while loop.time() < end and not self._no_hope():
            if self.ended and self._there():
                return True
            if not self.ended and loop.time() > noticed:
                return False
            await asyncio.sleep(POLL_S)
        return False
