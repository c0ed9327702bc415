"""The breaker that stops calls to a server that does not answer.

    state        a call may go out      after a success   after a failure
    closed       yes                    closed            closed; open after `threshold` in a row
    open         no, until `wait_s`     -                 -
    half-open    one, the probe         closed            open, and `wait_s` doubles

Without it every lookup would wait for a whole deadline before the store recomputes.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Final

THRESHOLD: Final = 3
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 30.0


class BreakerState(enum.Enum):
    """The states of the table above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """One breaker for one server. Thread-safe.

    Args:
        monotonic: seconds from any starting point, never going back.
        threshold: failures in a row, with no success between them, that open it.
        longest_wait_s: until the server is tried again.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        threshold: int = THRESHOLD,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._monotonic = monotonic
        self._threshold = threshold
        self._longest_wait_s = longest_wait_s
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self._opened_at = 0.0
        self._permit = 0  # changes with the state: results of older calls no longer count

    @property
    def state(self) -> BreakerState:
        """The present state; ``OPEN`` also after the wait, until the next call."""
        return self._state

    def ask(self) -> int | None:
        """Return a permit for one call, for ``succeed`` or ``fail``; None if no call is allowed."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return self._permit
            waited = self._monotonic() - self._opened_at >= self._wait_s
            if self._state is BreakerState.OPEN and waited:
                self._become(BreakerState.HALF_OPEN)
                return self._permit
            return None

    def succeed(self, permit: int) -> None:
        """Report that the call of this permit was answered."""
        with self._lock:
            if permit != self._permit:
                return
            self._failures = 0
            if self._state is BreakerState.HALF_OPEN:
                self._wait_s = FIRST_WAIT_S
                self._become(BreakerState.CLOSED)

    def fail(self, permit: int) -> None:
        """Report that the call of this permit was not answered."""
        with self._lock:
            if permit != self._permit:
                return
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._wait_s = min(2 * self._wait_s, self._longest_wait_s)
                self._open()
            elif self._failures >= self._threshold:
                self._open()

    def _open(self) -> None:
        self._opened_at = self._monotonic()
        self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        self._state = state
        self._permit += 1
