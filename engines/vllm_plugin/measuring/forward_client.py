"""Orders measuring requests at the hub, for the measuring thread of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from engines.calibration.gate.rules import worst_of
from engines.calibration.self_measurement import Interrupted
from engines.vllm_plugin.messages import Findings, Forward, ForwardDone
from kvstore.codecs.profile import Profile

REPEAT_S: Final = 2.0
MOST_ORDERS: Final = 1 << 32  # more than a measurement ever needs
T = TypeVar("T")


class ForwardClient:
    """Orders measuring requests, one at a time. Other threads call ``receive`` and ``close``."""

    def __init__(self, rank: int, send: Callable[[Forward | Findings], None]) -> None:
        self._rank = rank
        self._send = send
        self._lock = threading.Condition()
        self._number = 0
        self._done: ForwardDone | None = None
        self._joint: Findings | None = None
        self._closed = False

    def begin(self) -> None:
        """Forget how the previous measurement ended, and skip to numbers that no order has used."""
        with self._lock:
            self._joint = None
            # The same number on every rank, even if a rank gave up earlier than the others.
            self._number += MOST_ORDERS - self._number % MOST_ORDERS

    def next_number(self) -> int:
        """Return the number of the next order, which is the same on every rank."""
        self._number += 1
        return self._number

    def order(
        self,
        number: int,
        tokens: Sequence[int],
        salt: str,
        *,
        given: int = 0,
        wanted_from: int = -1,
        scored: bool = False,
    ) -> None:
        """Order a request (see ``Forward``), and wait for its end, for as long as users run.

        Raises:
            Interrupted: the engine is ending.
            RuntimeError: vLLM could not carry out the request.
        """
        order = Forward(self._rank, number, tuple(tokens), salt, given, wanted_from, scored)
        with self._lock:
            self._done = None
            done = self._answer_to(order, lambda: self._done)
        if done.error:
            raise RuntimeError(done.error)

    def _answer_to(self, message: Forward | Findings, answer: Callable[[], T | None]) -> T:
        """Send a message repeatedly until ``answer`` returns a value; return that value."""

        def answer_or_raise() -> T | None:
            if self._closed:
                raise Interrupted
            if self._joint is not None and self._joint.error:
                raise RuntimeError(f"another rank has given up: {self._joint.error}")
            return answer()

        while (found := answer_or_raise()) is None:
            self._send(message)
            self._lock.wait_for(answer_or_raise, REPEAT_S)
        return found

    def agree(self, profile: Profile) -> Profile:
        """Return the profile with the joint figures of all ranks: the worst of each.

        Raises:
            Interrupted: the engine is ending.
            RuntimeError: a rank has given up.
        """
        with self._lock:
            joint = self._answer_to(Findings(profile.rows, rank=self._rank), lambda: self._joint)
        return replace(profile, rows=worst_of([profile.rows, joint.rows]))

    def give_up(self, reason: str) -> None:
        """Inform the other ranks that this one stops measuring."""
        self._send(Findings((), reason, self._rank))

    def receive(self, news: ForwardDone | Findings) -> None:
        """Note the end of a request, or the joint figures of all ranks."""
        with self._lock:
            if isinstance(news, Findings):
                self._joint = news
            elif news.number == self._number:
                self._done = news
            self._lock.notify_all()

    def close(self) -> None:
        """End all waits with ``Interrupted``."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
