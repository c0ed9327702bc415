"""Gives the event loop a shelf: on a thread of its own, opened at the first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.stored.shelf import Shelf

T = TypeVar("T")


class Stored:
    """The stored objects of one gateway."""

    def __init__(self, open_shelf: Callable[[], Shelf] | None = None) -> None:
        """``open_shelf`` is called on the store's thread; None: nothing is stored here."""
        self._open = open_shelf
        self._shelf: Shelf | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stored")

    @property
    def enabled(self) -> bool:
        """False if nothing is ever stored: then every lookup finds nothing."""
        return self._open is not None

    async def ask(self, work: Callable[[Shelf], T], absent: T) -> T:
        """Do ``work`` on the shelf, in one piece; ``absent`` is the answer where there is none.

        Raises:
            StoreFailed: the shelf cannot be read or written now.
        """
        if self._open is None:
            return absent
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._work, work)

    async def close(self) -> None:
        """Finish what was asked, and let go of files and connections."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _work(self, work: Callable[[Shelf], T]) -> T:
        assert self._open is not None
        if self._shelf is None:
            self._shelf = self._open()
        return work(self._shelf)

    def _close(self) -> None:
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
