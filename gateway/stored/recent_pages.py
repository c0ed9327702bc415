"""Keeps the pages that were read last, so that a long conversation is not read whole at each turn.

A page never changes: a number is used once in a row, and a row that is put anew has another number.
Whether the row is still there, and which pages it has, its head says, which is read each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.stored.forms import Item
from gateway.stored.head import Page

MAX_BYTES: Final = 16 << 20
_ITEM_BYTES: Final = 200  # what an item takes beside its body


class PageKey(NamedTuple):
    """A page of one tenant's row; ``row``: its number."""

    tenant: str
    name: str
    row: int
    page: Page


class RecentPages:
    """Items of pages; those that were not read for longest go first. Used by several threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """``max_bytes``: of all pages together."""
        self._max_bytes = max_bytes
        self._pages: OrderedDict[PageKey, tuple[Sequence[Item], int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: PageKey) -> Sequence[Item] | None:
        """Return a page's items, if they are kept."""
        with self._lock:
            if key not in self._pages:
                return None
            self._pages.move_to_end(key)
            return self._pages[key][0]

    def put(self, key: PageKey, items: Sequence[Item]) -> None:
        """Keep a page's items, if they are not too large."""
        nbytes = sum(len(x.body) + _ITEM_BYTES for x in items)
        if nbytes > self._max_bytes // 4:
            return
        with self._lock:
            self._drop(key)
            self._pages[key] = items, nbytes
            self._nbytes += nbytes
            while self._nbytes > self._max_bytes:
                self._drop(next(iter(self._pages)))

    def forget(self, tenant: str, name: str) -> None:
        """Drop the pages of a row that is deleted."""
        with self._lock:
            for key in [x for x in self._pages if (x.tenant, x.name) == (tenant, name)]:
                self._drop(key)

    def _drop(self, key: PageKey) -> None:
        self._nbytes -= self._pages.pop(key, ((), 0))[1]
