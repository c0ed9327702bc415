"""Orders measuring requests from the hub, for the measuring thread of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from engines.calibration.agreement import with_figures_of
from engines.calibration.self_measurement import Interrupted
from engines.vllm_plugin.messages import Findings, Forward, ForwardDone
from kvstore.codecs.profile import Profile

REPEAT_S: Final = 2.0
MOST_ORDERS: Final = 1 << 32  # more than a measurement ever needs


class ForwardClient:
    """Orders requests, one after the other. Other threads call ``receive`` and ``close``."""

    def __init__(self, rank: int, send: Callable[[Forward | Findings], None]) -> None:
        self._rank = rank
        self._send = send
        self._lock = threading.Condition()
        self._number = 0
        self._done: ForwardDone | None = None
        self._joint: Findings | None = None
        self._closed = False

    def begin(self) -> None:
        """Forget the measurement before: how it ended, and how many orders this rank made."""
        with self._lock:
            self._joint = None
            # The same on every rank, also if one of them gave up before the others.
            self._number += MOST_ORDERS - self._number % MOST_ORDERS

    def next_number(self) -> int:
        """The number of the next order, the same on every rank."""
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
        """Order a request (see ``Forward``) and wait for its end, also while others are served.

        Raises:
            Interrupted: the engine ends.
            RuntimeError: vLLM could not carry out the request.
        """
        order = Forward(self._rank, number, tuple(tokens), salt, given, wanted_from, scored)
        with self._lock:
            self._done = None
            while (done := self._over()) is None:
                self._send(order)
                self._lock.wait_for(self._over, REPEAT_S)
        if done.error:
            raise RuntimeError(done.error)

    def _over(self) -> ForwardDone | None:
        """The news of the request's end; None if it has not come yet."""
        self._check()
        return self._done

    def _check(self) -> None:
        if self._closed:
            raise Interrupted
        if self._joint is not None and self._joint.error:
            raise RuntimeError(f"another rank has given up: {self._joint.error}")

    def agree(self, profile: Profile) -> Profile:
        """Return the same profile with the joint figures of all ranks.

        Raises:
            Interrupted: the engine ends.
            RuntimeError: a rank has given up.
        """
        findings = Findings(profile.rows, rank=self._rank)
        with self._lock:
            while (joint := self._agreed()) is None:
                self._send(findings)
                self._lock.wait_for(self._agreed, REPEAT_S)
        return replace(profile, rows=with_figures_of(profile.rows, joint.rows))

    def _agreed(self) -> Findings | None:
        self._check()
        return self._joint

    def give_up(self, reason: str) -> None:
        """Inform the other ranks that this one stops measuring."""
        self._send(Findings((), reason, self._rank))

    def receive(self, news: ForwardDone | Findings) -> None:
        """Note that a request is over, or the joint figures of all ranks."""
        with self._lock:
            if isinstance(news, Findings):
                self._joint = news
            elif news.number == self._number:
                self._done = news
            self._lock.notify_all()

    def close(self) -> None:
        """End all waits."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
