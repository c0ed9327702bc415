"""A thread that repeats a task at intervals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Periodic:
    """Calls ``work`` every ``every_s`` seconds until ``close``; with ``at_once`` also at start."""

    def __init__(
        self, work: Callable[[], None], every_s: float, name: str, *, at_once: bool = False
    ) -> None:
        self._work = work
        self._every_s = every_s
        self._first_s = 0.0 if at_once else every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for a running call of ``work``."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._closed.wait(wait_s):
            wait_s = self._every_s
            try:
                self._work()
            except Exception:  # the outermost frame of this thread: a bad round must not end it
                _log.exception("a round of %s failed", self._thread.name)
