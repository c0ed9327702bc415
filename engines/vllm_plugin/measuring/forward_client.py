"""Orders requests from the hub, for the measuring thread of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from engines.calibration.self_measurement import Interrupted
from engines.vllm_plugin.messages import Forward, ForwardDone

REPEAT_S: Final = 2.0


class ForwardClient:
    """Orders one request after the other. ``hear`` and ``close`` are for other threads."""

    def __init__(self, rank: int, send: Callable[[Forward], None]) -> None:
        self._rank = rank
        self._send = send
        self._lock = threading.Condition()
        self._number = 0
        self._done: ForwardDone | None = None
        self._closed = False

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
        forced: Sequence[int] = (),
        given: int = 0,
        wanted_from: int = -1,
    ) -> None:
        """Order a request (see ``Forward``) and wait for its end, as long as others are served.

        Raises:
            Interrupted: the engine ends.
            RuntimeError: vLLM could not do it.
        """
        order = Forward(self._rank, number, tuple(tokens), salt, tuple(forced), given, wanted_from)
        with self._lock:
            self._done = None
            while (done := self._over()) is None:
                self._send(order)
                self._lock.wait_for(self._over, REPEAT_S)
        if done.error:
            raise RuntimeError(done.error)

    def _over(self) -> ForwardDone | None:
        """The news of the end, if it is there."""
        if self._closed:
            raise Interrupted
        return self._done

    def hear(self, done: ForwardDone) -> None:
        """Note that a request is over."""
        with self._lock:
            if done.number == self._number:
                self._done = done
                self._lock.notify_all()

    def close(self) -> None:
        """End whoever waits."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
