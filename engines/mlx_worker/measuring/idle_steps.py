"""Small pieces of work that the owner thread does while no request needs it.

One thread hands them in and waits for each; the owner thread takes one between two rounds, and only
when nothing runs, waits or is being saved. So a request that arrives waits for one step at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engines.calibration.instrument import Interrupted

T = TypeVar("T")


class IdleSteps:
    """A line of one: the next step, and the thread that waits for it."""

    def __init__(
        self, wake: Callable[[], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Make an empty line; ``wake`` has the owner thread look again. Called on any thread."""
        self._wake = wake
        self._monotonic = monotonic
        self._others_at = float("-inf")  # when others last used the model
        self._lock = threading.Lock()
        self._next: Callable[[], None] | None = None
        self._refuse: Callable[[], None] | None = None
        self._closed = False
        self.num_done = 0  # steps since the start

    # ---- the measuring thread

    def run(self, step: Callable[[], T]) -> T:
        """Have ``step`` run on the owner thread in an idle moment, and return what it returns.

        Raises:
            Interrupted: the engine ends.
        """
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(step())
            except Exception as error:  # travels to who waits for it
                done.set_exception(error)

        def refuse() -> None:
            done.set_exception(Interrupted("the engine ends"))

        with self._lock:
            if self._closed:
                raise Interrupted("the engine ends")
            self._next, self._refuse = work, refuse
        self._wake()
        return done.result()

    @property
    def alone_s(self) -> float:
        """Seconds since a request used the model."""
        return self._monotonic() - self._others_at

    # ---- the owner thread

    def note_others(self) -> None:
        """Note that a request uses the model."""
        self._others_at = self._monotonic()

    @property
    def is_waiting(self) -> bool:
        """True if a step waits. Any thread."""
        return self._next is not None

    def do_one(self) -> None:
        """Do the step that waits, if one does."""
        with self._lock:
            work, self._next, self._refuse = self._next, None, None
        if work is not None:
            self.num_done += 1
            work()

    def close(self) -> None:
        """Refuse the step that waits and all to come. Any thread."""
        with self._lock:
            self._closed = True
            refuse, self._next, self._refuse = self._refuse, None, None
        if refuse is not None:
            refuse()
