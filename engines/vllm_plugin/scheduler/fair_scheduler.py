"""vLLM's scheduler with fair shares: a tenant's requests make way while another tenant waits.

    --scheduler-cls engines.vllm_plugin.scheduler.fair_scheduler.fair_scheduler

vLLM's own policies only order the waiting requests; they preempt a running request only when blocks
are short. Here, before each step, a request beyond its tenant's share is preempted in the same way
as by vLLM itself: its blocks are freed and stay in the prefix cache. So it later continues where it
was; only blocks that other requests needed meanwhile are computed again. vLLM calls ``schedule``.
The few other names of vLLM that are used here are pinned with its version.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from engines.vllm_plugin.grammar.backend import choose_compilers
from engines.vllm_plugin.scheduler.time_slices import TimeSlices


class FairShareMixin(Scheduler):
    """Consults ``TimeSlices`` before each step, and reports the step's tokens to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choose_compilers(self.structured_output_manager)
        self._slices = TimeSlices()
        self._left_out: str | None = None  # the first request that could not begin in the last step

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Preempt a request of a tenant beyond its share, then schedule a step as vLLM does."""
        self._slices.follow(self.requests)
        if isinstance(self.waiting, FCFSRequestQueue) and self.waiting:
            self._make_way()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        self._slices.count(output.num_scheduled_tokens)
        head = next((x for x in self.waiting if x not in self.deferred_waiting), None)
        self._left_out = head.request_id if head else None
        return output

    def _make_way(self) -> None:
        order = self._slices.ordered(self.waiting, self.running)
        # The head may also be a request that vLLM skipped while its stored blocks were looked up:
        # vLLM considers it again only if a place is free.
        if (exchange := self._to_exchange(order)) is not None:
            head, request = exchange
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), self.requires_kv_delivery)
            self._slices.made_way(request)
            order.remove(head)
            order = [head, *self._slices.ordered([request, *order], self.running)]
        self.waiting.clear()
        self.waiting.extend(order)

    def _to_exchange(self, order: list[Request]) -> tuple[Request, Request] | None:
        """Find a waiting and a running request that change places: one pair per step at most."""
        head, running = order[0], self.running
        num_running = len(running) + self.num_waiting_for_streaming_input
        for_blocks = num_running < self.max_num_active_reqs
        if for_blocks and head.request_id != self._left_out:
            return None
        request = self._slices.to_yield(head, running, for_blocks=for_blocks)
        exchange = (head, request) if request is not None else None
        if exchange is None and not for_blocks:
            exchange = self._slices.turn_within(order, running)
        if exchange is None or not self._request_blocks_can_be_freed(exchange[1]):
            return None
        return exchange


class FairScheduler(FairShareMixin):
    """Schedules a step when the previous one is done."""


class FairAsyncScheduler(FairShareMixin, AsyncScheduler):
    """Schedules one step ahead."""


def fair_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler that fits vLLM's settings; vLLM calls this in place of a class."""
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (FairAsyncScheduler if is_async else FairScheduler)(*args, **kwargs)
