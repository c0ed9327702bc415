"""Sends measuring requests to vLLM, one at a time, while no other request needs the model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from engines.calibration.agreement import worst_of
from engines.vllm_plugin.messages import (
    Forward,
    ForwardDone,
    JointFindings,
    RankFindings,
    RunForward,
)

LOOK_EVERY_S: Final = 0.05
# For one measuring request; long, since users' requests may share the model with it once it runs.
MOST_S: Final = 600.0


class ForwardHub(Protocol):
    """The part of ``Hub`` that measurements use."""

    @property
    def num_fronts(self) -> int:
        """The number of HTTP servers that are connected."""

    def ask_front(self, order: RunForward) -> None:
        """Order one of the HTTP servers to submit a request to vLLM."""

    def send_to_ranks(self, news: ForwardDone | JointFindings) -> None:
        """Send news of the measurement to every rank."""

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work()`` on the event loop."""


class Forwards:
    """The orders of the ranks. On the hub's event loop; any thread may call ``order_of``."""

    def __init__(self, hub: ForwardHub, num_ranks: int, is_idle: Callable[[], bool]) -> None:
        """``is_idle``: no user's request runs or waits. Called on the hub's thread."""
        self._hub = hub
        self._num_ranks = num_ranks
        self._is_idle = is_idle
        self._heard: dict[int, Forward] = {}  # the newest order, by rank
        self._last = 0  # number of the order that was carried out last
        self._findings: dict[int, RankFindings] = {}  # by rank
        self._open: dict[str, Forward] = {}
        self._done: dict[int, asyncio.Future[str]] = {}

    def order_of(self, ticket: str) -> Forward | None:
        """The order that a request with this ticket carries out; None if the ticket is unknown."""
        return self._open.get(ticket)

    def hear(self, order: Forward) -> None:
        """Note a rank's order of a request; submit it to vLLM when all ranks have ordered it."""
        if order.number <= self._last:
            return
        self._heard[order.rank] = order
        wanted = {msgspec.structs.replace(x, rank=0) for x in self._heard.values()}
        if len(self._heard) == self._num_ranks and len(wanted) == 1:
            self._heard.clear()
            self._last = order.number
            self._hub.spawn(partial(self._carry_out, wanted.pop()))

    def hear_done(self, done: ForwardDone) -> None:
        """Note that an HTTP server has the answer to a measuring request."""
        waiting = self._done.get(done.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(done.error)

    def hear_findings(self, findings: RankFindings) -> None:
        """Note a rank's figures; once all have come, or one rank has given up, inform all ranks."""
        self._findings[findings.rank] = findings
        found = [self._findings[x] for x in sorted(self._findings)]
        if error := next((x.error for x in found if x.error), ""):
            self._hub.send_to_ranks(JointFindings((), error))
        elif len(found) == self._num_ranks:
            self._hub.send_to_ranks(JointFindings(worst_of([x.rows for x in found])))

    async def _carry_out(self, order: Forward) -> None:
        while not (self._is_idle() and self._hub.num_fronts):
            await asyncio.sleep(LOOK_EVERY_S)
        ticket = secrets.token_hex(16)
        self._open[ticket] = order
        self._done[order.number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(MOST_S):
                self._hub.ask_front(RunForward(ticket, order))
                error = await self._done[order.number]
        except TimeoutError:
            error = f"no answer came within {MOST_S:.0f} s"
        finally:
            del self._open[ticket], self._done[order.number]
        self._hub.send_to_ranks(ForwardDone(order.number, error))
