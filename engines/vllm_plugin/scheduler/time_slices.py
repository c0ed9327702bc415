"""Decides which of vLLM's requests is next, and which makes way for it. Pure logic, no vLLM."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from engines.host.fair_shares import (
    LONG_ANSWER,
    PROMPT_TOKEN,
    QUANTUM,
    FairShares,
    after_those_who_ran,
    in_fair_order,
    in_turns,
    length_class,
)
from engines.http import PARAMS_FIELD
from engines.vllm_plugin.identity import IncomingRequest, ticket_of, weight_of

NEVER: Final = sys.maxsize
# A request that makes way because blocks are short may lose its own, and must compute or restore
# them again.
BLOCKS_QUANTUM: Final = 4 * QUANTUM


def _length(request: Any) -> int:
    return length_class(request.num_prompt_tokens)


def tenant_of(request: IncomingRequest) -> str:
    """Return the tenant of a request; "" for a request that did not come through the gateway."""
    ours = (request.kv_transfer_params or {}).get(PARAMS_FIELD)
    tenant = ours.get("tenant") if isinstance(ours, Mapping) else None
    return tenant if isinstance(tenant, str) else ""


class TimeSlices:
    """Counts tenants' tokens and requests' steps. Belongs to the thread of vLLM's scheduler."""

    def __init__(self) -> None:
        self._shares = FairShares()
        self._tenants: dict[str, str] = {}  # by request, for all requests that vLLM has
        self._runs: dict[str, int] = {}  # steps since the request began, or last made way
        self._made_way: dict[str, int] = {}  # when it last made way, as a number of ``_turns``
        # The tokens of its tenant when the request arrived or last made way.
        self._waits_from: dict[str, float] = {}
        self._num_begun: Counter[str] = Counter()  # requests that have begun, by tenant
        # By tenant: requests that continued after making way, since the last request began.
        self._num_back: Counter[str] = Counter()
        # When the request arrived, as a number of ``_turns``; each step reorders vLLM's queue.
        self._came: dict[str, int] = {}
        self._turns = itertools.count(1)

    def follow(self, requests: Mapping[str, Any]) -> None:
        """Note new and finished requests; ``requests``: all requests that vLLM has, by id."""
        for request_id in self._tenants.keys() - requests.keys():
            self._shares.leave(self._tenants.pop(request_id))
            for known in (self._runs, self._made_way, self._waits_from, self._came):
                known.pop(request_id, None)
        if not self._tenants:
            self._num_begun.clear()
            self._num_back.clear()
        for request_id in [x for x in requests if x not in self._tenants]:
            tenant = self._tenants[request_id] = tenant_of(requests[request_id])
            self._came[request_id] = next(self._turns)
            self._shares.come(tenant, weight_of(request_id))
            self._waits_from[request_id] = self._shares.tokens(tenant)

    def count(self, num_tokens: Mapping[str, int]) -> None:
        """Count the tokens that a step computes; ``num_tokens``: by request."""
        for request_id, number in num_tokens.items():
            if (tenant := self._tenants.get(request_id)) is not None:
                self._shares.serve(tenant, 1 if number == 1 else number * PROMPT_TOKEN)
                if request_id not in self._runs:
                    self._num_begun[tenant] += 1
                    self._num_back[tenant] = 0
                elif not self._runs[request_id]:
                    self._num_back[tenant] += 1
                self._runs[request_id] = self._runs.get(request_id, 0) + 1

    def ordered(self, waiting: Iterable[Any], running: Collection[Any]) -> list[Any]:
        """Put waiting requests in the order in which they will run.

        Within a tenant, requests that ran already come first, in the order in which they made way,
        but one of every four is a request that has not begun; these are in the order of
        ``host.fair_shares``.
        """
        lines: dict[str, list[Any]] = {}
        for request in waiting:
            lines.setdefault(self._tenant(request), []).append(request)
        ordered = {tenant: self._line(tenant, line) for tenant, line in lines.items()}
        return in_fair_order(self._shares, ordered, self._places(running))

    def _line(self, tenant: str, line: Sequence[Any]) -> list[Any]:
        fresh = [x for x in line if x.request_id not in self._runs]
        if len(fresh) == len(line):
            ran = []
        else:  # requests that vLLM itself preempted for lack of blocks are in front already
            ran = [x for x in line if x.request_id in self._runs]
            ran.sort(key=lambda x: self._made_way.get(x.request_id, NEVER))
        fresh.sort(key=lambda x: self._came.get(x.request_id, NEVER))
        in_order = in_turns(fresh, _length, self._num_begun[tenant])
        return after_those_who_ran(ran, in_order, self._num_back[tenant])

    def turn_within(self, order: Iterable[Any], running: Sequence[Any]) -> tuple[Any, Any] | None:
        """Find two requests of one tenant that change places, for any tenant in the queue.

        Returns:
            The waiting request, and the running one.
        """
        heads: dict[str, Any] = {}
        for request in order:
            heads.setdefault(self._tenant(request), request)
        for tenant, head in heads.items():
            request = self._own_to_yield(tenant, head, running)
            if request is not None:
                return head, request
        return None

    def to_yield(
        self, head: Any, running: Sequence[Any], *, for_blocks: bool = False
    ) -> Any | None:
        """Choose the running request that makes way for ``head``; None if no request must.

        ``for_blocks``: there are free places, but no free blocks.
        """
        if ticket_of(head):  # a measuring request can wait
            return None
        claimant = self._tenant(head)
        quantum = BLOCKS_QUANTUM if for_blocks else QUANTUM
        holder = self._shares.holder_to_yield(claimant, 1, 1, self._places(running), quantum)
        if holder is not None:
            return self._longest_run(holder, running)
        return None if for_blocks else self._own_to_yield(claimant, head, running)

    def _own_to_yield(self, tenant: str, head: Any, running: Sequence[Any]) -> Any | None:
        """Choose the request of the same tenant that makes way for ``head``, if it is its turn.

        If ``head`` has made way before, any running request of its tenant may make way for it. If
        ``head`` has not begun, only a long answer may, which has run for at least a quantum since
        it began or last made way.
        """
        if ticket_of(head) or not self._is_its_turn(tenant, head, running):
            return None
        if head.request_id in self._made_way:
            return self._longest_run(tenant, running)
        long = [
            x for x in running if x.num_output_tokens >= LONG_ANSWER and self._run(x) >= QUANTUM
        ]
        return self._longest_run(tenant, long)

    def _is_its_turn(self, tenant: str, head: Any, running: Sequence[Any]) -> bool:
        """True if ``head`` has waited for a quantum of tokens for each place of its tenant."""
        waited = self._shares.tokens(tenant) - self._waits_from.get(head.request_id, math.inf)
        return waited >= QUANTUM * self._places(running)[tenant]

    def made_way(self, request: Any) -> None:
        """Note that a request was preempted."""
        self._runs[request.request_id] = 0
        self._made_way[request.request_id] = next(self._turns)
        self._waits_from[request.request_id] = self._shares.tokens(self._tenant(request))

    def _longest_run(self, tenant: str, running: Iterable[Any]) -> Any | None:
        # A measuring request is not preempted: its own blocks are read at its end.
        mine = [x for x in running if self._tenant(x) == tenant and not ticket_of(x)]
        return max(mine, key=self._run, default=None)

    def _run(self, request: Any) -> int:
        return self._runs.get(request.request_id, 0)

    def _places(self, running: Iterable[Any]) -> Counter[str]:
        return Counter(map(self._tenant, running))

    def _tenant(self, request: Any) -> str:
        return self._tenants.get(request.request_id, "")
