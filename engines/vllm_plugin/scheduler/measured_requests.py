"""Sends a measurement's requests to vLLM while it is idle, and plans the use of their blocks.

They are sent one at a time, while no other request needs the model. Some blocks of a request are
filled with given KV before it runs; others are held until the measurement has read them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from engines.calibration.gate.rules import worst_of
from engines.vllm_plugin.identity import ticket_of
from engines.vllm_plugin.messages import Findings, Forward, ForwardDone, RunForward
from engines.vllm_plugin.plan import Given, WantedBlocks
from engines.vllm_plugin.scheduler.hub import Hub
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks
from engines.vllm_plugin.scheduler.turn_saves import TurnSaves

LOOK_EVERY_S: Final = 0.05
# For one measuring request; long, since users' requests may share the model with it once it runs.
MOST_S: Final = 600.0


class Forwards:
    """Carries out the ranks' orders, on the hub's event loop. Any thread may call ``order_of``."""

    def __init__(self, hub: Hub, is_idle: Callable[[], bool]) -> None:
        """``is_idle``: no user's request runs or waits. Called on the hub's thread."""
        self._hub = hub
        self._is_idle = is_idle
        self._received: dict[int, Forward] = {}  # the newest order, by rank
        self._last = 0  # number of the order that was carried out last
        self._findings: dict[int, Findings] = {}  # by rank
        self._open: dict[str, Forward] = {}
        self._done: dict[int, asyncio.Future[str]] = {}

    def order_of(self, ticket: str) -> Forward | None:
        """The order that a request with this ticket carries out; None if the ticket is unknown."""
        return self._open.get(ticket)

    def receive(self, news: Forward | ForwardDone | Findings) -> None:
        """Note a rank's order or figures, or that an HTTP server has the answer to a request."""
        match news:
            case Forward():
                self._note_order(news)
            case ForwardDone():
                waiting = self._done.get(news.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(news.error)
            case Findings():
                self._note_findings(news)

    def _note_order(self, order: Forward) -> None:
        """Carry out an order once all ranks have sent it."""
        if order.number <= self._last:
            return
        self._received[order.rank] = order
        wanted = {msgspec.structs.replace(x, rank=0) for x in self._received.values()}
        if len(self._received) == self._hub.num_ranks and len(wanted) == 1:
            self._received.clear()
            self._findings.clear()  # those of an earlier measurement
            self._last = order.number
            self._hub.spawn(partial(self._carry_out, wanted.pop()))

    def _note_findings(self, findings: Findings) -> None:
        """Send the joint figures to all ranks once all have come, or one rank's error."""
        self._findings[findings.rank] = findings
        found = [self._findings[x] for x in sorted(self._findings)]
        if error := next((x.error for x in found if x.error), ""):
            self._hub.send(Findings((), error))
        elif len(found) == self._hub.num_ranks:
            self._hub.send(Findings(worst_of([x.rows for x in found])))

    async def _carry_out(self, order: Forward) -> None:
        while not (self._is_idle() and self._hub.num_fronts):
            await asyncio.sleep(LOOK_EVERY_S)
        ticket = secrets.token_hex(16)
        self._open[ticket] = order
        self._done[order.number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(MOST_S):
                self._hub.send(RunForward(ticket, order))
                error = await self._done[order.number]
        except TimeoutError:
            error = f"no answer came within {MOST_S:.0f} s"
        finally:
            del self._open[ticket], self._done[order.number]
        self._hub.send(ForwardDone(order.number, error))


class MeasuredRequests:
    """The measuring requests that vLLM knows, by their ids. All methods run on vLLM's thread."""

    def __init__(
        self,
        order_of: Callable[[str], Forward | None],
        resident: ResidentSessions,
        saves: TurnSaves,
        blocks: TokenBlocks,
    ) -> None:
        """``order_of`` returns the order of a ticket; None for a ticket that we did not issue."""
        self._order_of = order_of
        self._resident = resident
        self._saves = saves
        self._blocks = blocks
        self._orders: dict[str, Forward] = {}
        self._given: list[Given] = []
        self._wanted: list[WantedBlocks] = []

    def add(self, request: Any) -> bool:
        """Note a new request; False if it is an ordinary one."""
        ticket = ticket_of(request)
        order = self._order_of(ticket) if ticket else None
        if order is not None:
            self._orders[request.request_id] = order
        return order is not None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._orders

    def num_given(self, request: Any, num_computed_tokens: int) -> int:
        """The number of tokens after the computed ones whose KV is prepared.

        They are loaded like those of a returning session, one step before the request runs.
        """
        return max(0, self._orders[request.request_id].given - num_computed_tokens)

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan to fill the blocks that vLLM has set aside; ``tables``: block ids by group."""
        order = self._orders.get(request.request_id)
        if order is not None and num_external_tokens:
            groups, boundary = self._blocks.groups, order.given // self._blocks.block_tokens
            state_ids = groups.state_blocks(tables, boundary, 0)
            ids = list(tables[groups.full][:boundary])
            self._given.append(Given(request.request_id, order.number, ids, state_ids))

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """Hold the blocks to read until every rank has read them."""
        order = self._orders.pop(request.request_id, None)
        if order is None or order.wanted_from < 0:
            return
        size, num_tokens = self._blocks.block_tokens, len(order.tokens)
        ids = list(
            tables[self._blocks.groups.full][order.wanted_from // size : -(-num_tokens // size)]
        )
        boundary = num_tokens // size
        hashes = self._blocks.computed_hashes(request, boundary)
        places = [boundary] if len(hashes) == boundary else []
        state = self._resident.newest_state(hashes, places).get(boundary, [])
        job = self._saves.hold([*ids, *state])
        self._wanted.append(WantedBlocks(job, order.number, ids, boundary, state))

    def pop_planned(self) -> tuple[list[Given], list[WantedBlocks]]:
        """The blocks to fill and those to read in the next step."""
        planned = self._given, self._wanted
        self._given, self._wanted = [], []
        return planned

    def alone_in(self, scheduled: Collection[str]) -> int:
        """The number of the order, if its request is the only one in a step; else 0.

        ``scheduled``: ids of the requests in the step.
        """
        orders = [self._orders[x] for x in scheduled if x in self._orders]
        return orders[0].number if len(orders) == len(scheduled) == 1 else 0
