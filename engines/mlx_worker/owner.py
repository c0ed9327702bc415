"""The one thread that touches mlx.

mlx evaluates a lazy array only on the thread whose stream made it, so this thread loads the model,
feeds prompts, steps the batches and turns KV into numpy. Everybody else hands it commands and gets
events, numbers or numpy views back.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from typing import TypeVar

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engines.config import EngineConfig
from engines.mlx_worker.batching import Batches, Detached, Step
from engines.mlx_worker.generation import (
    Admitted,
    CacheOutcome,
    ContextTooLong,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generation,
    ModelFacts,
    Overloaded,
    Prefill,
)
from engines.mlx_worker.guard import Guard
from engines.mlx_worker.loading import LoadedModel
from engines.mlx_worker.logprobs import token_event
from engines.mlx_worker.prefill import Feeder
from engines.mlx_worker.stream import EventStream, Outbox
from engines.mlx_worker.turn import LiveRow, Prompt, Turn

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Owner:
    """``Generator`` of the HTTP side. ``start`` and ``submit`` are called on the event loop."""

    def __init__(self, load: Callable[[], LoadedModel], config: EngineConfig, name: str) -> None:
        """``load`` runs on the owner thread; ``name`` is what clients call the model."""
        self._load = load
        self._config = config
        self._name = name
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Prompt] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mlx-owner", daemon=True)

    # ---- event loop

    async def start(self) -> None:
        """Load the model; returns when it can generate. Raises what loading raises."""
        self._outbox = Outbox(asyncio.get_running_loop())
        self._started: Future[None] = Future()
        self._thread.start()
        await asyncio.wrap_future(self._started)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def tokenizer(self) -> object:
        return self._loaded.tokenizer

    def submit(self, generation: Generation) -> EventStream:
        room = self._facts.max_context - len(generation.prompt)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(generation.prompt)} tokens; with an answer of at least one "
                f"token that is more than the context of {self._facts.max_context} tokens"
            )
        if self._closing:
            raise Overloaded("the engine is shutting down")
        stream = EventStream(len(generation.rows), lambda row: self._post(lambda: stop(row)))
        turn = Turn(generation, stream)
        max_tokens = min(generation.max_tokens, room)
        turn.rows = [
            LiveRow(turn, i, Guard(row), list(generation.prompt), max_tokens)
            for i, row in enumerate(generation.rows)
        ]

        def stop(row: int | None) -> None:
            self._stop(turn, row)

        self._post(lambda: self._waiting.append(Prompt(turn, list(turn.rows), generation.prompt)))
        return stream

    async def close(self) -> None:
        """End all requests, then the thread."""
        self._closing = True
        self._post(self._stop_all)
        await asyncio.to_thread(self._thread.join)

    # ---- any thread

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    # ---- owner thread

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:  # whatever it is, the caller of start() must hear of it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while self._obey():
            self._admit()
            self._decode()
            self._feed()
            self._outbox.send()
        self._batches.close()
        # A stream that outlives its thread can abort the process at exit.
        mx.clear_streams()

    def _open(self) -> None:
        self._loaded = self._load()
        self._model = self._loaded.model
        self._feeder = Feeder(self._model, self._config.prefill_step)
        self._batches = Batches(self._model, self._config.max_batch)
        self._facts = ModelFacts(
            name=self._name,
            max_context=self._config.max_context or self._loaded.max_context,
            vocab_size=self._loaded.vocab_size,
            trimmable=True,
            hibernation=False,
        )

    def _obey(self) -> bool:
        """Run the commands; waits for one only when there is nothing to do. False = leave."""
        busy = bool(self._waiting or len(self._feeder) or len(self._batches))
        try:
            command = self._commands.get(block=not busy)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return not self._closing

    def _admit(self) -> None:
        while self._waiting and self._has_slots(len(self._waiting[0].rows)):
            prompt = self._waiting.popleft()
            prompt.caches = make_prompt_cache(self._model)
            self._feeder.add(prompt)
            if not prompt.turn.admitted:
                prompt.turn.admitted = True
                self._send(prompt.turn, Admitted(CacheOutcome("miss", 0, "disabled")))

    def _has_slots(self, num_rows: int) -> bool:
        taken = len(self._batches) + sum(len(x.rows) for x in self._feeder.prompts)
        return taken + num_rows <= self._config.max_batch

    def _decode(self) -> None:
        for bucket in self._batches.buckets:
            if not bucket.rows:
                continue
            try:
                steps = bucket.step()
            except Exception as error:  # mlx, the model: anything. Others must go on.
                logger.exception("a decode step failed")
                for row in bucket.reset():
                    self._fail(row.turn, error)
                continue
            for step in steps:
                self._take(step)
        for detached in self._batches.detach_outgrown():
            self._move(detached)

    def _take(self, step: Step) -> None:
        row = step.row
        if row.guard.fault is not None:
            self._fail(row.turn, row.guard.fault)
            return
        top = row.turn.generation.top_logprobs
        self._send(row.turn, token_event(row.index, step.token, step.logprobs, top))
        if step.finish is not None:
            self._end(row, step.finish)

    def _move(self, detached: Detached) -> None:
        """Deliver the token a row had sampled when it left its batch, and let it go on."""
        if (step := detached.step()) is not None:
            self._take(step)
        if detached.row in detached.row.turn.rows:
            self._batches.insert(detached.row, detached.caches)

    def _feed(self) -> None:
        if not len(self._feeder):
            return
        prompt = self._feeder.next()
        if prompt.done < prompt.target:
            try:
                self._feeder.feed(prompt, prompt.target, busy=len(self._batches) > 0)
            except Exception as error:  # as in _decode; here only this prompt is lost
                logger.exception("a prefill failed")
                self._fail(prompt.turn, error)
                return
            self._send(prompt.turn, Prefill(prompt.done, len(prompt.tokens)))
        if prompt.done >= prompt.target:
            self._feeder.remove(prompt)
            for row in prompt.rows[1:]:
                self._batches.insert(row, deepcopy(prompt.caches))
            self._batches.insert(prompt.rows[0], prompt.caches)

    def _stop_all(self) -> None:
        for turn in self._turns():
            self._stop(turn, None)
        self._outbox.send()

    def _turns(self) -> list[Turn]:
        rows = [row for bucket in self._batches.buckets for row in bucket.rows.values()]
        rows += [row for x in (*self._feeder.prompts, *self._waiting) for row in x.rows]
        return list(dict.fromkeys(row.turn for row in rows))

    def _stop(self, turn: Turn, index: int | None) -> None:
        for row in [x for x in turn.rows if index is None or x.index == index]:
            self._withdraw(row)
            self._end(row, "cancelled")

    def _withdraw(self, row: LiveRow) -> None:
        """Take a row out of wherever it is."""
        self._batches.detach([row])
        for prompt in (*self._feeder.prompts, *self._waiting):
            if row in prompt.rows:
                prompt.rows.remove(row)
                if not prompt.rows and prompt in self._waiting:
                    self._waiting.remove(prompt)
                elif not prompt.rows:
                    self._feeder.remove(prompt)

    def _end(self, row: LiveRow, reason: FinishReason) -> None:
        row.turn.rows.remove(row)
        self._send(row.turn, Finished(row.index, reason))

    def _fail(self, turn: Turn, error: Exception) -> None:
        for row in list(turn.rows):
            self._withdraw(row)
            turn.rows.remove(row)
        self._send(turn, Failed(f"{type(error).__name__}: {error}"))

    def _send(self, turn: Turn, event: Event) -> None:
        self._outbox.put(turn.stream, event)
