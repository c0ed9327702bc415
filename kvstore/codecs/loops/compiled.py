"""Imports modules of compiled functions, if numba is installed, and counts compilations.

One process has one compiler, so there is one ``COMPILATIONS``. It counts what this process has
compiled, and logs a line when that takes long. Code that comes from numba's cache is not counted.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final, TypeVar

from kvstore.workers import is_background

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOPS: Final = "kvstore.codecs.loops.compiled_loops"
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
        self.waited_s = 0.0  # how long callers waited for imports and compilations
        self._silence_s = silence_s
        self._said = False

    @contextmanager
    def look(self, name: str, folder: str = "") -> Iterator[list[bool]]:
        """Count the ``with`` block as one compilation, or as cached if it appends True to the list.

        Once per process, when imports and compilations have taken more than ``SILENCE_S`` in all,
        the log says so. ``folder``: where the result is kept; for the log.
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
        """Add the time of the ``with`` block, an import of numba for example, to ``waited_s``."""
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


@functools.cache
def compiled_module(name: str) -> ModuleType | None:
    """Import a module that needs numba; return None without it, and the log says so once.

    Importing numba takes most of a second: only a process that packs should pay for it.
    """
    try:
        with COMPILATIONS.wait():
            return importlib.import_module(name)
    except ImportError as error:
        _report(str(error))
        return None


@functools.cache
def _report(reason: str) -> None:
    logger.info("codecs run in numpy, slower: %s (install thermocline[fast])", reason)


def is_proven(comparison: Callable[[], bool], called: str) -> bool:
    """Return whether compiled code passes a comparison with its definition; log it if not.

    Code that raises does not pass. Compilers have bugs, and wrong code would damage stored KV.
    """
    try:
        if comparison():
            return True
        logger.warning("%s are wrong on this host: numpy serves", called)
    except Exception:  # a compiler, its cache or wrong code may raise anything
        logger.exception("%s fail on this host: numpy serves", called)
    return False


def proven(compiled: T | None, definition: T, agrees: Callable[[T], bool], called: str) -> T:
    """Return compiled code if there is any and it agrees with its definition, else the latter.

    ``called``: what the log calls the code.
    """
    if compiled is not None and is_proven(lambda: agrees(compiled), called):
        return compiled
    return definition


def compiled_stages() -> ModuleType | None:
    """Return the inner loops of stages and of rotations, or None without numba."""
    return compiled_module(LOOPS)
