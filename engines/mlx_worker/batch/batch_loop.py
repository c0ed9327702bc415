"""The main loop of the owner thread: ``BatchLoop.step`` and its parts."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from engines.config import EngineConfig
from engines.host.work_line import QueueLimit
from engines.mlx_worker.batch.admission import Admission, MemoryBudget
from engines.mlx_worker.batch.batches import Batches, LengthBucket, StepOutput
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.request import PrefillTask, Request, RunningRequests, Sequence
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.generation import EventBuffer, PrefillProgress
from engines.mlx_worker.sessions.hot_sessions import HotCache
from kvstore.session import SessionName
from kvstore.store.states import StateAt

logger = logging.getLogger(__name__)


class BatchLoop:
    """Continuous batching and its parts; belongs to the owner thread."""

    def __init__(
        self,
        model: Any,
        plan: CachePlan,
        config: EngineConfig,
        hot_cache: HotCache,
        events: EventBuffer,
        limit: QueueLimit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the loop for one model.

        Args:
            limit: counts the waiting requests.
            clock: returns seconds from any start.
        """
        self.hot_cache, self.cold = hot_cache, hot_cache.cold
        state_step = self.cold.store.chunk_tokens if plan.needs_state and self.cold else 0
        self.prefiller = Prefiller(model, config.prefill_step, state_step)
        # The last place may go to a task of several answers.
        self.batches = Batches(model, 2 * config.max_batch, state_step)
        self.budget = MemoryBudget(
            config, plan.cost, self.batches, self.prefiller, hot_cache.sessions
        )
        parts = (self.prefiller, self.batches, self.budget, hot_cache)
        self.admission = Admission(*parts, limit, events, clock)
        self.requests = RunningRequests(hot_cache, events)
        self._entries = itertools.count()
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> dict[str, int]:
        """All counters since the start. Any thread."""
        counted = [self._counters, self.admission.counters, self.requests.counters]
        counted += [self.hot_cache.counters, *([self.cold.counters] if self.cold else [])]
        return {name: count for x in counted for name, count in dict(x).items()}

    @property
    def is_working(self) -> bool:
        """True if there is something to compute right now."""
        return bool(len(self.batches) or self.prefiller.ready)

    @property
    def is_waiting(self) -> bool:
        """True if a request waits for a slot or for memory."""
        return self.admission.num_waiting > 0

    @property
    def is_idle(self) -> bool:
        """True if nothing runs, waits, is on its way into a batch, or is being saved."""
        return not (
            self.is_working
            or self.is_waiting
            or self.prefiller.admitted
            or self.hot_cache.is_saving
        )

    def lacks(self, nbytes: int) -> bool:
        """Return whether requests wait for memory, or would if ``nbytes`` were taken.

        False while nothing runs or waits.
        """
        runs = self.is_working or self.prefiller.admitted
        return self.is_waiting or bool(runs and self.budget.missing() + nbytes > 0)

    def arrive(self, request: Request, tasks: list[PrefillTask]) -> None:
        """Take a request over; ``tasks`` will bring its sequences into a batch."""
        self.requests.begin(request)
        for task in tasks:
            self.admission.enqueue(task)

    # ---- one round of work

    def step(self) -> None:
        """Do one round: at most one token per running sequence and one chunk of one prompt."""
        self.admission.admit()
        self._send_back()
        self._decode()
        self._rebucket()
        self._prefill()

    def _send_back(self) -> None:
        """Make room if running sequences have outgrown the budget.

        Idle sessions are dropped first, then the youngest sequence goes back to the queue. Its KV
        becomes an idle session, which may be saved, dropped and restored or computed again. At most
        one sequence goes back per round, and none while a save is about to release memory.
        """
        missing = self.budget.missing()
        if missing <= 0 or self.hot_cache.make_room(missing, None) or self.hot_cache.is_saving:
            return
        num_running = len(self.batches)
        if not num_running or num_running + len(self.prefiller.ready) < 2:
            return
        self._counters["sent_back"] += 1
        sequence = max(self.batches.sequences, key=lambda x: x.entered)
        (detached,) = self.batches.detach([sequence])
        if (output := detached.step()) is not None:
            self._take(output)
        if sequence in sequence.request.sequences:  # otherwise that token was its last
            tokens = sequence.tokens
            self.requests.keep(sequence, detached.caches, len(tokens) - 1)
            self.admission.requeue(PrefillTask(sequence.request, [sequence], tokens))

    def _decode(self) -> None:
        """Decode one token for every running sequence."""
        began = time.perf_counter()
        for bucket in self.batches.buckets:
            if bucket.sequences:
                self._step_bucket(bucket)
        self.prefiller.step_s = time.perf_counter() - began

    def _rebucket(self) -> None:
        """Move sequences that became too long for their bucket into the next one."""
        for detached in self.batches.detach_outgrown():
            if (output := detached.step()) is not None:
                self._take(output)
            if detached.sequence in detached.sequence.request.sequences:
                self.batches.insert(detached.sequence, detached.caches)

    def _prefill(self) -> None:
        """Feed one chunk of one prompt; its sequences join the batch after the last chunk."""
        if (task := self.prefiller.next()) is not None:
            self._feed_chunk(task)
        for task in [x for x in self.prefiller.ready if x.num_cached >= x.target]:
            self.prefiller.remove(task)
            self._join_batch(task)

    def _step_bucket(self, bucket: LengthBucket) -> None:
        try:
            outputs = bucket.step()
        except Exception as error:  # from the model or mlx; all sequences of this bucket are lost
            logger.exception("a decode step failed")
            for request in dict.fromkeys(x.request for x in bucket.reset()):
                self.fail(request, error)
            return
        for output in outputs:
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        """Deliver one token, and end its sequence if it was the last."""
        sequence, request = output.sequence, output.sequence.request
        if sequence not in request.sequences:  # another sequence of this step failed the request
            return
        # The step has sampled the next token already, unless this was the last.
        num_sampled = len(sequence.emitted) + (output.finish is None)
        if sequence.guard.fault is not None and sequence.guard.is_faulty_within(num_sampled):
            self.fail(request, sequence.guard.fault)
            return
        self._counters["generated_tokens"] += 1
        self.requests.send(request, output.event())
        if output.finish is not None:
            self.requests.finish(sequence, output.finish, output.caches, output.num_cached)

    def _feed_chunk(self, task: PrefillTask) -> None:
        """Feed one chunk of a prompt; an error fails its request."""
        try:
            self.prefiller.feed(task, busy=len(self.batches) > 0)
        except Exception as error:  # from the model or mlx; only this prompt is lost
            logger.exception("a prefill failed")
            self.fail(task.request, error)
            return
        if task.num_cached in task.state_positions:
            state = kv_arrays.state_tree(task.caches)
            task.request.states.append(StateAt(task.num_cached, state))
        self.requests.send(task.request, PrefillProgress(task.num_cached, len(task.tokens)))
        self.admission.fed(task)

    def _join_batch(self, task: PrefillTask) -> None:
        task.request.num_fed = len(task.tokens)  # the first decode step feeds the last one
        copies = [deepcopy(task.caches) for _ in task.sequences[1:]]
        for sequence, caches in zip(task.sequences, [task.caches, *copies], strict=True):
            sequence.entered = next(self._entries)
            self.batches.insert(sequence, caches)

    # ---- ends that come from outside

    def stop(self, request: Request, index: int | None) -> None:
        """End the sequence number ``index``, or all (None); their slots are free at return."""
        sequences = [x for x in request.sequences if index is None or x.index == index]
        for x in self.batches.detach(sequences):
            self.requests.finish(x.sequence, "cancelled", x.caches, x.num_cached)
        for task in self.admission.tasks:
            self._withdraw(task, sequences)

    def stop_all(self) -> None:
        """End every request, and keep the KV that was computed."""
        for request in self.requests.all():
            self.stop(request, None)

    def forget(self, key: SessionName) -> None:
        """Drop the session's idle KV, and keep none of its running requests at their end."""
        self.requests.forget(key)
        self.admission.forget(key)
        self.hot_cache.forget(key)

    def fail(self, request: Request, error: Exception) -> None:
        """End the whole request with an error, and keep none of its KV."""
        self.batches.detach(request.sequences)
        for task in self.admission.tasks:
            if task.request is request:
                self.admission.remove(task, failed=True)
        self.requests.fail(request, error)

    def fail_all(self, error: Exception) -> None:
        """Fail every request after an unexpected error, since no running state can be trusted."""
        for bucket in self.batches.buckets:
            bucket.reset()
        for request in self.requests.all():
            self.fail(request, error)

    def _withdraw(self, task: PrefillTask, sequences: list[Sequence]) -> None:
        leaving = task.drop(sequences)
        if leaving and not task.sequences:
            self.admission.remove(task)
        for sequence in leaving:
            # The sequences that stay need these caches.
            caches = [] if task.sequences else task.caches
            unchanged = task.saved if task.num_cached == task.num_reused else None
            self.requests.finish(sequence, "cancelled", caches, task.num_cached, unchanged)
