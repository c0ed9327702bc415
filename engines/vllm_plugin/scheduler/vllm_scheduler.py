"""Makes vLLM's own scheduler with two changes that it has no setting for.

    --scheduler-cls engines.vllm_plugin.scheduler.vllm_scheduler.scheduler

Grammars go to the compiler that handles them well (``grammar.backend``). And requests that wait for
a long prompt (``shared_prefills``) do not slow it down: vLLM gives a long prompt fewer tokens in a
step while other requests wait, so those that could not run yet are not counted as waiting.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from engines.vllm_plugin.grammar.backend import choose_compilers


class SharedPrefillScheduler(Scheduler):
    """vLLM's scheduler, which does not divide a step's tokens among held-back requests."""

    _is_scheduling = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._is_scheduling = True
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._is_scheduling = False

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        if self._is_scheduling:  # vLLM's own connectors hold none back
            waiting -= getattr(self.connector, "num_held_back", 0)
        return running, waiting


class AsyncSharedPrefillScheduler(SharedPrefillScheduler, AsyncScheduler):
    """The same for asynchronous scheduling, which plans a step while the one before it runs."""


def scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler; vLLM calls this in place of a class."""
    choose_compilers(kwargs["structured_output_manager"])
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (AsyncSharedPrefillScheduler if is_async else SharedPrefillScheduler)(*args, **kwargs)
