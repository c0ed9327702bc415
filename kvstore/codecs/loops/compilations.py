"""Counts what this process has compiled, and logs a line when that takes long.

One process has one compiler, so there is one ``COMPILATIONS``. Code that a cache has already is
not counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.workers import is_background

logger = logging.getLogger(__name__)

SILENCE_S: Final = 1.0  # of waiting for imports and compilations, before the log says so
CACHED_S: Final = 0.5  # reading a function from a cache takes less; it is no compilation


class Compilations:
    """Counts compilations and their processor time. Thread-safe."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._num_cached = 0
        self._num_background = 0
        self._seconds = 0.0
        self.waited_s = 0.0  # of a caller's time, that of compilations included
        self._silence_s = silence_s
        self._said = False

    @contextmanager
    def look(self, name: str, folder: str = "") -> Iterator[list[bool]]:
        """Count what is compiled within, unless ``[True]`` was put into the list: it was cached.

        Once per process, when imports and compiling have taken longer than a second in all,
        the log says so. ``folder``: where the result is kept.
        """
        begun, cached = time.thread_time(), list[bool]()
        left_s = max(self._silence_s - self.waited_s, min(CACHED_S, self._silence_s))
        timer = threading.Timer(left_s, self._say, (name, folder))
        timer.daemon = True
        if not self._said:
            timer.start()
        try:
            with self.wait():
                yield cached
        finally:
            timer.cancel()
            with self._lock:
                if any(cached):
                    self._num_cached += 1
                else:
                    self._num += 1
                    self._num_background += is_background()
                    self._seconds += time.thread_time() - begun

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count the time within as one of silence: numba is imported, for example."""
        begun = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.waited_s += time.monotonic() - begun

    @property
    def seconds(self) -> float:
        """The processor time of all compilations so far."""
        with self._lock:
            return self._seconds

    @property
    def num_functions(self) -> int:
        """The number of functions that were compiled or taken from a cache so far."""
        with self._lock:
            return self._num + self._num_cached

    def as_counters(self) -> dict[str, int]:
        """Return the number of compilations, and their milliseconds of processor time.

        ``background_compilations``: those on threads for which no request waits. A difference
        that grows after the start means that one may have waited.
        """
        with self._lock:
            return {
                "compilations": self._num,
                "background_compilations": self._num_background,
                "compilation_ms": round(1000 * self._seconds),
            }

    def _say(self, name: str, folder: str) -> None:
        with self._lock:
            if self._said:
                return
            self._said = True
        kept = f" (kept in {folder})" if folder else ""
        logger.warning(
            "compiling for this processor (%s): once per machine, seconds for a codec%s", name, kept
        )


COMPILATIONS: Final = Compilations()
