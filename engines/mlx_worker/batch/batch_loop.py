"""The main loop of the owner thread, ``BatchLoop.step``, and the parts that it is made of."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from engines.config import SPARE_PLACE, EngineConfig
from engines.host.work_line import QueueLimit
from engines.mlx_worker.batch.admission import Admission
from engines.mlx_worker.batch.batches import Batches, LengthBucket, StepOutput
from engines.mlx_worker.batch.memory_budget import MemoryBudget
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.prefix_reuse import Post, Prefetches, PrefixReuse
from engines.mlx_worker.batch.request import PrefillTask, Request, RunningRequests, Sequence
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.generation import EventBuffer, PrefillProgress
from engines.mlx_worker.sessions.cold_sessions import ColdSessions
from engines.mlx_worker.sessions.hot_cache import HotCache, Notify
from engines.mlx_worker.sessions.hot_sessions import HotSessions
from kvstore.session import SessionName
from kvstore.store.states import StateAt

logger = logging.getLogger(__name__)


class BatchLoop:
    """Continuous batching. Belongs to the owner thread."""

    def __init__(
        self,
        admission: Admission,
        prefiller: Prefiller,
        batches: Batches,
        budget: MemoryBudget,
        hot_cache: HotCache,
        requests: RunningRequests,
    ) -> None:
        self._admission = admission
        self._prefiller = prefiller
        self._batches = batches
        self._budget = budget
        self._hot_cache = hot_cache
        self._requests = requests
        self._entries = itertools.count()
        self.counters: Counter[str] = Counter()

    @property
    def is_working(self) -> bool:
        """True if there is something to compute right now."""
        return bool(len(self._batches) or self._prefiller.num_ready)

    @property
    def is_waiting(self) -> bool:
        """True if a request waits for a slot or for memory."""
        return self._admission.num_waiting > 0

    @property
    def is_idle(self) -> bool:
        """True if nothing runs, waits, is on its way into a batch, or is being saved."""
        return not (
            self.is_working
            or self.is_waiting
            or self._prefiller.num_admitted
            or self._hot_cache.is_saving
        )

    def lacks(self, nbytes: int) -> bool:
        """True if requests wait, or soon will, for memory of which a measurement holds ``nbytes``.

        False while nothing runs or waits.
        """
        runs = self.is_working or self._prefiller.num_admitted
        return self.is_waiting or bool(runs and self._budget.missing() + nbytes > 0)

    def arrive(self, request: Request, tasks: list[PrefillTask]) -> None:
        """Take a request in; ``tasks`` bring its sequences into a batch."""
        self._requests.begin(request)
        for task in tasks:
            self._admission.enqueue(task)

    # ---- one round of work

    def step(self) -> None:
        """Do one round: at most one token per running sequence and one chunk of one prompt."""
        self._admission.admit()
        self._send_back()
        self._decode()
        self._rebucket()
        self._prefill()

    def _send_back(self) -> None:
        """Make room if running sequences have outgrown the budget.

        Idle sessions go first, then the youngest sequence: it goes back into the line, and its KV
        becomes an idle session, which sleeps, and is restored or computed again. One per round at
        most, and none while a save is about to release memory.
        """
        missing = self._budget.missing()
        if missing <= 0 or self._hot_cache.make_room(missing, None) or self._hot_cache.is_saving:
            return
        num_running = len(self._batches)
        if not num_running or num_running + self._prefiller.num_ready < 2:
            return
        self.counters["sent_back"] += 1
        sequence = max(self._batches.sequences, key=lambda x: x.entered)
        (detached,) = self._batches.detach([sequence])
        if (output := detached.step()) is not None:
            self._take(output)
        if sequence in sequence.request.sequences:  # else that token was its last
            tokens = sequence.tokens
            self._requests.keep(sequence, detached.caches, len(tokens) - 1)
            self._admission.requeue(PrefillTask(sequence.request, [sequence], tokens))

    def _decode(self) -> None:
        """Decode one token for every running sequence."""
        began = time.perf_counter()
        for bucket in self._batches.buckets:
            if bucket.sequences:
                self._step_bucket(bucket)
        self._prefiller.step_s = time.perf_counter() - began

    def _rebucket(self) -> None:
        """Move sequences that became too long for their bucket into the next one."""
        for detached in self._batches.detach_outgrown():
            if (output := detached.step()) is not None:
                self._take(output)
            if detached.sequence in detached.sequence.request.sequences:
                self._batches.insert(detached.sequence, detached.caches)

    def _prefill(self) -> None:
        """Feed one chunk of one prompt; its sequences join the batch after the last chunk."""
        if (task := self._prefiller.next()) is not None:
            self._feed_chunk(task)
        for task in [x for x in self._prefiller.ready if x.num_cached >= x.target]:
            self._prefiller.remove(task)
            self._join_batch(task)

    def _step_bucket(self, bucket: LengthBucket) -> None:
        try:
            outputs = bucket.step()
        except Exception as error:  # as in _feed_chunk, but all sequences of this batch are lost
            logger.exception("a decode step failed")
            for request in dict.fromkeys(x.request for x in bucket.reset()):
                self.fail(request, error)
            return
        for output in outputs:
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        """Deliver one token, and end its sequence if it was the last."""
        sequence, request = output.sequence, output.sequence.request
        if sequence not in request.sequences:  # failed through another sequence of this very step
            return
        # Its next token is sampled already, unless this was the last.
        num_sampled = len(sequence.emitted) + (output.finish is None)
        if sequence.guard.fault is not None and sequence.guard.is_faulty_within(num_sampled):
            self.fail(request, sequence.guard.fault)
            return
        self.counters["generated_tokens"] += 1
        self._requests.send(request, output.event())
        if output.finish is not None:
            self._requests.finish(sequence, output.finish, output.caches, output.num_cached)

    def _feed_chunk(self, task: PrefillTask) -> None:
        """Feed one chunk; an error in it fails the request."""
        try:
            self._prefiller.feed(task, busy=len(self._batches) > 0)
        except Exception as error:  # the model, mlx: anything. Only this prompt is lost.
            logger.exception("a prefill failed")
            self.fail(task.request, error)
            return
        if task.num_cached in task.state_positions:
            state = kv_arrays.state_tree(task.caches)
            task.request.states.append(StateAt(task.num_cached, state))
        self._requests.send(task.request, PrefillProgress(task.num_cached, len(task.tokens)))
        self._admission.fed(task)

    def _join_batch(self, task: PrefillTask) -> None:
        task.request.num_fed = len(task.tokens)  # the first decode step feeds the last one
        copies = [deepcopy(task.caches) for _ in task.sequences[1:]]
        for sequence, caches in zip(task.sequences, [task.caches, *copies], strict=True):
            sequence.entered = next(self._entries)
            self._batches.insert(sequence, caches)

    # ---- ends that come from outside

    def stop(self, request: Request, index: int | None) -> None:
        """End one sequence, or all (None); their slots are free when this returns."""
        sequences = [x for x in request.sequences if index is None or x.index == index]
        for x in self._batches.detach(sequences):
            self._requests.finish(x.sequence, "cancelled", x.caches, x.num_cached)
        for task in self._admission.tasks:
            self._withdraw(task, sequences)

    def stop_all(self) -> None:
        """End every request, and keep what was computed."""
        for request in self._requests.all():
            self.stop(request, None)

    def forget(self, key: SessionName) -> None:
        """Keep no KV of this session, neither idle nor of requests that run now."""
        self._requests.forget(key)
        self._admission.forget(key)
        self._hot_cache.forget(key)

    def fail(self, request: Request, error: Exception) -> None:
        """End the whole request and keep nothing of it."""
        self._batches.detach(request.sequences)
        for task in self._admission.tasks:
            if task.request is request:
                self._admission.remove(task, failed=True)
        self._requests.fail(request, error)

    def fail_all(self, error: Exception) -> None:
        """End everything after a defect of our own: nothing that runs can be trusted."""
        for bucket in self._batches.buckets:
            bucket.reset()
        for request in self._requests.all():
            self.fail(request, error)

    def _withdraw(self, task: PrefillTask, sequences: list[Sequence]) -> None:
        leaving = task.drop(sequences)
        if leaving and not task.sequences:
            self._admission.remove(task)
        for sequence in leaving:
            # Sequences that go on need these caches.
            caches = [] if task.sequences else task.caches
            unchanged = task.saved if task.num_cached == task.num_reused else None
            self._requests.finish(sequence, "cancelled", caches, task.num_cached, unchanged)


@dataclass(frozen=True)
class ThreadContext:
    """The owner thread's ways in and out, for the parts that live on it."""

    events: EventBuffer
    limit: QueueLimit
    post: Post
    notify: Notify
    clock: Callable[[], float]


@dataclass(frozen=True)
class EngineParts:
    """The parts that others than the owner thread's loop ask for something."""

    loop: BatchLoop
    budget: MemoryBudget
    admission: Admission
    requests: RunningRequests
    prefiller: Prefiller
    batches: Batches
    hot_cache: HotCache
    cold: ColdSessions | None

    @property
    def counters(self) -> dict[str, int]:
        """All counts since the start. Any thread."""
        cold = dict(self.cold.counters) if self.cold else {}
        return {
            **dict(self.admission.counters),
            **cold,
            **dict(self.requests.counters),
            **dict(self.loop.counters),
            **dict(self.hot_cache.counters),
        }


def assemble(
    model: Any,
    plan: CachePlan,
    cold: ColdSessions | None,
    config: EngineConfig,
    thread: ThreadContext,
) -> EngineParts:
    """Make the parts for one model. Call it on the owner thread."""
    hot = HotSessions(thread.clock)
    hot_cache = HotCache(hot, cold, thread.notify, nudge=lambda: thread.post(lambda: None))
    state_step = cold.store.chunk_tokens if plan.needs_state and cold is not None else 0
    prefiller = Prefiller(model, config.prefill_step, state_step)
    # The last place may go to a task of several answers.
    batches = Batches(model, 2 * config.max_batch, state_step)
    places = config.max_batch + SPARE_PLACE
    budget = MemoryBudget(config.hot_bytes, places, plan.cost, batches, prefiller, hot)
    admission = Admission(
        prefixes=PrefixReuse(hot_cache, cold, thread.post),
        prefetches=Prefetches(hot_cache, cold, budget, thread.post),
        prefiller=prefiller,
        budget=budget,
        hot_cache=hot_cache,
        limit=thread.limit,
        events=thread.events,
        clock=thread.clock,
    )
    requests = RunningRequests(hot_cache, thread.events, thread.notify)
    loop = BatchLoop(admission, prefiller, batches, budget, hot_cache, requests)
    return EngineParts(loop, budget, admission, requests, prefiller, batches, hot_cache, cold)
