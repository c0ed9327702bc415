"""Adds blobs that earlier lives of an engine left on the server to its tier's budget, on a thread.

No request waits for it: the tier serves meanwhile. A server that is down is tried again until it
has answered once; a server that came back empty has an empty book.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.book import Book, BookEntry

BATCH: Final = 256  # or a few more; the tier's writers wait for one batch at most
FIRST_WAIT_S: Final = 2.0
LONGEST_WAIT_S: Final = 60.0

_log = logging.getLogger(__name__)


class EarlierLives:
    """Reads a book once, and passes its entries on in batches, the most recently used first.

    Args:
        enter: takes a batch. All writes of one key are in the same batch.
        on_end: called once, when no more batches follow.
    """

    def __init__(
        self,
        book: Book,
        enter: Callable[[Sequence[BookEntry]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._book = book
        self._enter = enter
        self._on_end = on_end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-redis-book", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for a page of the book, or a call of ``enter``, that has begun."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            num_found = self._read_when_there()
            if num_found:
                _log.info("redis: %d blobs of earlier lives count in the budget", num_found)
        except Exception:  # the outermost frame of this thread: the tier serves without it
            _log.exception("what earlier lives left in redis was not counted")
        finally:
            self._on_end()

    def _read_when_there(self) -> int:
        wait_s = FIRST_WAIT_S
        while not self._closing.is_set():
            try:
                return self._read()
            except TierUnavailable:
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return 0

    def _read(self) -> int:
        entries: dict[BookEntry, None] = {}  # a server may list an entry twice
        for page in self._book.pages():
            if self._closing.is_set():
                return 0
            entries |= dict.fromkeys(page)
        for batch in _batches(_by_last_use(entries)):
            if self._closing.is_set():
                return 0
            self._enter(batch)
        return len({x.key for x in entries})


def _by_last_use(entries: Iterable[BookEntry]) -> Iterator[list[BookEntry]]:
    """Yield all entries of each key, the most recently used key first."""
    by_key: dict[bytes, list[BookEntry]] = {}
    for entry in sorted(entries, key=lambda x: x.stamp, reverse=True):
        by_key.setdefault(entry.key, []).append(entry)
    yield from by_key.values()


def _batches(keys: Iterable[list[BookEntry]]) -> Iterator[list[BookEntry]]:
    batch: list[BookEntry] = []
    for entries in keys:
        batch += entries
        if len(batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
