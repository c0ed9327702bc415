"""Requests of the HTTP side to the owner thread, and the events that come back.

The HTTP side turns a request into a ``Generation`` and reads ``Event``s from the
``EventQueue`` that ``Owner.submit`` returns. Samplers and logits processors are opaque callables
that the owner thread calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from engines.http import CacheOutcome
from engines.mlx_worker.model.loading import UsualSampling
from kvstore.session import SessionRef

# (1, vocab) log-probabilities -> (1,) token. Called on the owner thread only.
Sampler: TypeAlias = Callable[[Any], Any]
# (tokens so far, (1, vocab) logits) -> (1, vocab) logits. Called on the owner thread only.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SequenceSampling:
    """The way one of the ``n`` answers chooses its tokens.

    Never share a sampler or a processor between answers: they have state.
    """

    sampler: Sampler | None = None  # None = greedy
    logits_processors: Sequence[LogitsProcessor] = ()


@dataclass(frozen=True)
class Generation:
    """A prompt, and how to answer it."""

    prompt: Sequence[int] | np.ndarray  # at least one token; an array is int32
    sampling: Sequence[SequenceSampling]  # one for each answer
    max_tokens: int
    # Token sequences that end an answer; the tokens that end it are delivered too.
    stop_sequences: Sequence[tuple[int, ...]]
    session: SessionRef | None = None
    # Positions in ``prompt`` where a later turn may come back to (end of the system prompt, and as
    # the last one the end of the messages, before the generation marker). Models whose cache cannot
    # be trimmed take a copy of their state at the first and the last.
    boundaries: Sequence[int] = ()
    top_logprobs: int | None = None  # None = no logprobs at all


@dataclass(frozen=True)
class PromptAdmitted:
    """Always the first event: the prompt has its place in a batch.

    It comes again if the prompt reuses something else in the end: the prompt whose beginning it
    waited for ended early.
    """

    cache: CacheOutcome


@dataclass(frozen=True)
class PrefillProgress:
    """``done`` of the prompt's ``total`` tokens are in the cache."""

    done: int
    total: int


@dataclass(frozen=True)
class Token:
    """One more token of answer number ``index``."""

    index: int
    id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()  # (token, log-probability), the likeliest first


@dataclass(frozen=True)
class Finished:
    """The last event of answer number ``index``. ``cancelled`` after ``stop_sequence``."""

    index: int
    reason: FinishReason


@dataclass(frozen=True)
class Failed:
    """The last event of all answers: the generation died (a defect in a processor, no memory)."""

    message: str


Event: TypeAlias = PromptAdmitted | PrefillProgress | Token | Finished | Failed


@dataclass(frozen=True)
class ModelFacts:
    """The properties of the loaded model that the HTTP side needs."""

    name: str
    max_context: int  # tokens, prompt and answer together
    vocab_size: int  # width of the logits
    hibernation: bool
    hibernation_reason: str = ""  # why not
    usual_sampling: UsualSampling = UsualSampling()


class EventQueue:
    """The events of one generation. All but the constructor is the event loop's."""

    def __init__(self, num_answers: int, stop: Callable[[int | None], None]) -> None:
        """``stop(index)`` asks the owner to end an answer, ``stop(None)`` all of them.

        It is let go of as soon as there is nothing to stop: it holds the request, and the request
        this queue. In that ring every prompt would stay until Python's next full collection,
        which a process with many long-lived objects puts off for thousands of requests.
        """
        self._num_open = num_answers
        self._stop = stop
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def deliver(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def events(self) -> AsyncIterator[Event]:
        """Yield events as they come; ends after the last answer's, or after ``Failed``."""
        while self._num_open:
            await self._arrived.wait()
            self._arrived.clear()
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Finished):
                    self._num_open -= 1
                elif isinstance(event, Failed):
                    self._num_open = 0
                if not self._num_open:
                    self._stop = _nothing
                yield event

    def stop(self, index: int) -> None:
        """End one answer early (a stop string was seen); its slot is free before the next step."""
        self._stop(index)

    def cancel(self) -> None:
        """End all answers at once (the client went away); what was computed is still saved."""
        self._stop(None)
        self._stop = _nothing


def _nothing(index: int | None) -> None:
    pass


class EventBuffer:
    """Collects events during one round, so that one hop to the event loop carries them all.

    Belongs to the owner thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._addressed: list[tuple[EventQueue, Event]] = []

    def put(self, queue: EventQueue, event: Event) -> None:
        self._addressed.append((queue, event))

    def flush(self) -> None:
        """Deliver what was collected, in its order."""
        if self._addressed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, self._addressed)
        self._addressed = []


def _deliver(addressed: list[tuple[EventQueue, Event]]) -> None:
    for queue, event in addressed:
        queue.deliver(event)
