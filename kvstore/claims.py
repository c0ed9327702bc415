"""One at a time per session: whoever changes what is stored of a session claims it first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Claims:
    """Thread-safe; a thread must not claim twice."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._claimed: set[bytes] = set()

    @contextmanager
    def claim(self, record_key: bytes) -> Iterator[None]:
        """Waits for whoever has it."""
        with self._changed:
            self._changed.wait_for(lambda: record_key not in self._claimed)
            self._claimed.add(record_key)
        try:
            yield
        finally:
            with self._changed:
                self._claimed.discard(record_key)
                self._changed.notify_all()
