"""Claims on sessions: a thread claims a session before it changes the session's stored data."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Claims:
    """Thread-safe; a thread must not claim one session twice.

    ``changed`` is notified whenever a claim ends. Threads may use it to wait for other things, too.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._claimed: set[bytes] = set()

    @contextmanager
    def claim(self, record_key: bytes) -> Iterator[None]:
        """Hold the session; waits until its present holder releases it."""
        with self.changed:
            self.changed.wait_for(lambda: record_key not in self._claimed)
            self._claimed.add(record_key)
        try:
            yield
        finally:
            self.release(record_key)

    def take(self, record_key: bytes) -> bool:
        """Claim the session if it is free, without waiting; ``release`` ends it."""
        with self.changed:
            if record_key in self._claimed:
                return False
            self._claimed.add(record_key)
            return True

    def release(self, record_key: bytes) -> None:
        """End a claim."""
        with self.changed:
            self._claimed.discard(record_key)
            self.changed.notify_all()

    def is_claimed(self, record_key: bytes) -> bool:
        """True if a thread holds the session just now."""
        with self.changed:
            return record_key in self._claimed
