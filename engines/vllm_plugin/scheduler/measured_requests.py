"""Finds the blocks of a measuring request that get given KV, and holds those that are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from engines.vllm_plugin.identity import ticket_of
from engines.vllm_plugin.messages import Forward
from engines.vllm_plugin.plan import Given
from engines.vllm_plugin.scheduler.token_blocks import TokenBlocks
from engines.vllm_plugin.scheduler.turn_saves import TurnSaves


class MeasuredRequests:
    """The measuring requests that vLLM knows, by their ids. All methods run on vLLM's thread."""

    def __init__(
        self, order_of: Callable[[str], Forward | None], saves: TurnSaves, blocks: TokenBlocks
    ) -> None:
        """``order_of`` returns the order of a ticket; None for a ticket that we did not issue."""
        self._order_of = order_of
        self._saves = saves
        self._blocks = blocks
        self._orders: dict[str, Forward] = {}
        self._given: list[Given] = []

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

        They are loaded like those of a returning session, a step before the request's first.
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

    def take_given(self) -> list[Given]:
        """The blocks to fill in the next step."""
        given, self._given = self._given, []
        return given

    def alone_in(self, scheduled: Collection[str]) -> int:
        """The number of the order, if its request is the only one in a step; else 0.

        ``scheduled``: ids of the requests in the step.
        """
        orders = [self._orders[x] for x in scheduled if x in self._orders]
        return orders[0].number if len(orders) == len(scheduled) == 1 else 0

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """Hold the blocks to read until every rank has read them."""
        order = self._orders.pop(request.request_id, None)
        if order is None or order.wanted_from < 0:
            return
        block_tokens = self._blocks.block_tokens
        first, last = order.wanted_from // block_tokens, -(-len(order.tokens) // block_tokens)
        ids = tables[self._blocks.groups.full][first:last]
        boundary = len(order.tokens) // block_tokens
        self._saves.hold_wanted(request, order.number, ids, boundary)
