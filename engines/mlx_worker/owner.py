"""The owner thread, the only one that uses mlx.

mlx evaluates a lazy array only on the thread whose stream made it, so this thread loads the model,
feeds prompts, steps the batches and converts KV to numpy. Other threads post commands to it, and
get events, numbers or numpy views back. Between commands it runs ``batch.batch_loop``.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

import mlx.core as mx

from engines.config import EngineConfig
from engines.host.work_line import QueueFull, QueueLimit
from engines.kv_budget import longest_context, too_little
from engines.mlx_worker.batch.batch_loop import BatchLoop
from engines.mlx_worker.batch.request import Request, split_request
from engines.mlx_worker.cache.layout import CachePlan, probe
from engines.mlx_worker.cache.packed_model import attending, with_packed_caches
from engines.mlx_worker.generation import (
    EventBuffer,
    EventQueue,
    Generation,
    ModelFacts,
)
from engines.mlx_worker.measuring.steps import HeldPrefix, IdleSteps
from engines.mlx_worker.model.loading import LoadedModel
from engines.mlx_worker.sessions.cold_sessions import ColdSessions
from engines.mlx_worker.sessions.hot_sessions import Cause, HotCache, HotSessions
from engines.mlx_worker.sessions.store_opening import OpenedStore
from engines.openai.errors import context_too_long
from kvstore.session import SessionRef
from kvstore.store.cold_store import ColdStore

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Called on the owner thread once the model is loaded. Returns the store for the model's KV, or one
# sentence that says why there is none.
OpenStore: TypeAlias = Callable[[LoadedModel, CachePlan], OpenedStore | str]
Listener: TypeAlias = Callable[[Cause, SessionRef, str], None]  # the string: the reason, or ""
# Requests that may wait for each slot of the batch.
WAITING_PER_SLOT = 16
# Seconds between checks while a prompt waits for room and nothing runs.
LOOK_AGAIN_S = 0.25
# Seconds without a request after which the engine counts as quiet.
QUIET_S = 1.0
# Freed buffers that mlx may keep for reuse; small, since dropped KV must really free memory.
MLX_POOL_BYTES = 64 << 20
# glibc's initial mmap threshold.
LARGE_BLOCK_BYTES: Final = 128 << 10
# Half of Linux's default limit per process. Beyond it, glibc puts large blocks into heaps again.
MAX_MAPPINGS: Final = 32_768
# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4


def _look() -> None:
    """Do nothing; as a command, it makes the owner thread look for work."""


class Owner:
    """The owner thread; its public methods are called on the event loop."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        config: EngineConfig,
        name: str,
        open_store: OpenStore = lambda model, plan: "it is switched off",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an owner; nothing runs before ``start``.

        Args:
            load: loads the model; called on the owner thread.
            name: the model's name for clients.
            open_store: see ``OpenStore``.

        Attributes:
            loaded: the model; any thread may use its tokenizer, only the owner thread the rest.
            plan: the caches of the loaded model.
            is_closing: True once no new work is accepted.
            on_change: called on the event loop whenever a session changes.
        """
        self._load = load
        self._config = config
        self._name = name
        self._open_store = open_store
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Work for moments in which no request needs the thread.
        self.idle_steps = IdleSteps(wake=lambda: self.post(_look))
        self._limit = QueueLimit(WAITING_PER_SLOT * config.max_batch)
        self.on_change: Listener = lambda cause, session, why: None
        self.is_closing = False
        self._until_closed = ExitStack()  # contexts that end with the thread
        self._leaving = False  # the thread ends after this round
        self._started: Future[None] = Future()
        # Set when the thread has ended, on request or not: no request can be served any more.
        self.ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="mlx-owner", daemon=True)

    async def start(self) -> None:
        """Load the model; return when it can generate.

        Raises:
            CannotServe, OSError, ValueError: the model or a setting is wrong.
        """
        self._loop = asyncio.get_running_loop()
        self._events = EventBuffer(self._loop)
        self._thread.start()
        await asyncio.wrap_future(self._started)

    @property
    def store(self) -> ColdStore | None:
        """The cold store; None if sessions of this model do not hibernate."""
        return self.batching.cold.store if self.batching.cold else None

    @property
    def is_quiet(self) -> bool:
        """True if no request has used this engine for ``QUIET_S``. Any thread."""
        return self.idle_steps.alone_s >= QUIET_S and not self._limit.num_waiting

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a slot or for memory."""
        return self._limit.num_waiting

    def submit(self, generation: Generation) -> EventQueue:
        """Start a generation; return the queue of its events.

        Raises:
            InvalidRequest: the prompt fills the context.
            QueueFull: too many requests wait already, or the engine is shutting down.
        """
        if self.is_closing:
            raise QueueFull("the engine is shutting down")
        most, num_tokens = self.facts.max_context, len(generation.prompt)
        if num_tokens >= most:
            raise context_too_long(most, num_tokens, "messages")
        self._limit.enter()
        events = EventQueue(
            len(generation.sampling),
            lambda index: self.post(lambda: self.batching.stop(request, index)),
        )
        request = Request(generation, events)
        # Answers of this request that decode at once: as many as fit into the budget together.
        at_once = self._config.hot_bytes // self.plan.cost.row_bytes(num_tokens) // 2
        at_once = max(1, min(self._config.max_batch, at_once))
        tasks = split_request(request, min(generation.max_tokens, most - num_tokens), at_once)
        self.post(lambda: self.batching.arrive(request, tasks))
        return events

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the owner thread, between two rounds, and return its result."""
        done: Future[T] = Future()

        def command() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # raised in the caller
                done.set_exception(error)

        self.post(command)
        return await asyncio.wrap_future(done)

    async def close(self) -> None:
        """End all requests, keep their KV, and end the thread; the store stays open."""
        self.is_closing = True
        self.idle_steps.close()
        if self._thread.is_alive():
            self.post(self._leave)
            await asyncio.to_thread(self._thread.join)

    # ---- any thread

    def post(self, command: Callable[[], None]) -> None:
        """Queue ``command`` to run on the owner thread, between two rounds."""
        self._commands.put(command)

    def notify(self, cause: Cause, session: SessionRef, why: str = "") -> None:
        """Schedule a call of ``on_change`` on the event loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.on_change, cause, session, why)

    # ---- the owner thread

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:  # the caller of start() must get any error
            mx.clear_streams()  # see _close
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while not self._leaving:
                self._round()
        finally:
            self.is_closing = True
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.ended.set)
            self._close()

    def _round(self) -> None:
        try:
            self._run_commands()
            batching = self.batching
            batching.step()
            if not batching.is_idle:
                self.idle_steps.note_others()
            if self.held and self.held.nbytes and batching.lacks(self.held.nbytes):
                self.held.drop()
            if self._is_free:
                self.idle_steps.do_one()
        except Exception as error:  # an unexpected error: fail what runs, and stay alive
            logger.exception("a round of the engine failed")
            self.batching.fail_all(error)
        self._events.flush()

    def _run_commands(self) -> None:
        """Run the queued commands; wait for one if there is nothing to compute."""
        timeout = LOOK_AGAIN_S if self.batching.is_waiting else None
        try:
            may_wait = not (self.batching.is_working or self._is_free)
            command = self._commands.get(may_wait, timeout)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    @property
    def _is_free(self) -> bool:
        """True if an idle step waits and may run, since there are no requests or commands."""
        if not self.idle_steps.is_waiting or self._leaving:
            return False
        return self._commands.empty() and self.batching.is_idle

    def _leave(self) -> None:
        self._leaving = True  # first, so that it is set even if the rest fails
        self.idle_steps.close()
        self.batching.stop_all()

    def _close(self) -> None:
        self.idle_steps.close()
        if self.held is not None:
            self.held.drop()
        if self.batching.cold is not None:
            self.batching.cold.close()
        self.batching.batches.close()
        self._until_closed.close()
        # A stream that outlives its thread can abort the process at exit.
        mx.clear_streams()

    def _open(self) -> None:
        return_large_blocks()
        self.loaded = self._load()
        model = self.loaded.model
        self.plan = probe(model)
        if self._config.hot_codec:
            live, self.plan = with_packed_caches(model, self.plan, self._config)
            if self.plan.layout is not None and live.attends_better(self.plan.layout):
                self._until_closed.enter_context(attending(model))
            model = live
            self.loaded = replace(self.loaded, model=model)
        max_context = self._affordable_context()
        mx.set_cache_limit(min(MLX_POOL_BYTES, self._config.hot_bytes // 4))
        opened = self._open_store(self.loaded, self.plan)
        cold, self.codecs = None, None
        if not isinstance(opened, str):
            cold = ColdSessions(opened.store, model, self.plan, self.post)
            self.codecs = opened.codecs
        self.facts = ModelFacts(
            name=self._name,
            max_context=max_context,
            vocab_size=self.loaded.vocab_size,
            hibernation=cold is not None,
            hibernation_reason=opened if isinstance(opened, str) else "",
            usual_sampling=self.loaded.usual_sampling,
        )
        # The prefix of a measurement, if this model can be measured.
        layout = self.plan.layout
        self.held = HeldPrefix(model, layout) if layout else None
        sessions = HotSessions(self._clock)
        hot_cache = HotCache(sessions, cold, self.notify, nudge=lambda: self.post(_look))
        self.batching = BatchLoop(
            model, self.plan, self._config, hot_cache, self._events, self._limit, self._clock
        )
        mx.clear_cache()
        self.weight_bytes = mx.get_active_memory()

    def _affordable_context(self) -> int:
        wanted = min(self._config.max_context or self.loaded.max_context, self.loaded.max_context)
        if reason := too_little(self.plan.cost, self._config.hot_bytes, wanted):
            raise ValueError(reason)
        affordable = longest_context(self.plan.cost, self._config.hot_bytes, wanted)
        if affordable < wanted:
            logger.warning("hot_bytes limit the context to %d of %d tokens", affordable, wanted)
        return affordable


def return_large_blocks() -> bool:
    """Make glibc return large freed blocks to the system; return False without glibc.

    glibc keeps blocks below a threshold in heaps, which shrink only at their ends, and maps each
    larger block separately. Whenever such a block is freed, glibc raises the threshold, up to
    32 MiB. From then on the heaps hold both mlx's short-lived buffers and the packed blobs of the
    RAM tier (about 1 MiB each, kept for hours), and the holes between them stay resident. Measured
    with 32 users and several turns each: 70 MiB of holes after half a minute, 250 after five. With
    a fixed threshold there were 30 to 70 throughout, and as many turns were served.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = {
        _M_MMAP_THRESHOLD: LARGE_BLOCK_BYTES,
        _M_TRIM_THRESHOLD: LARGE_BLOCK_BYTES,  # would otherwise rise together with the other
        _M_MMAP_MAX: MAX_MAPPINGS,
    }
    return all(libc.mallopt(name, value) for name, value in settings.items())
