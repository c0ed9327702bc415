"""The messages between the HTTP side and the owner thread: generations, and their events.

The HTTP side turns a request into a ``Generation`` and reads ``Event``s from the ``EventQueue``
that ``Owner.submit`` returns. The owner thread calls samplers and logits processors without knowing
what they do.
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
    """The sampler and logits processors of one of the ``n`` answers.

    Samplers and processors have state, so two answers must not share one.
    """

    sampler: Sampler | None = None  # None = greedy
    logits_processors: Sequence[LogitsProcessor] = ()


@dataclass(frozen=True)
class Generation:
    """A prompt, and the settings for its answers."""

    prompt: Sequence[int] | np.ndarray  # at least one token; an array is int32
    sampling: Sequence[SequenceSampling]  # one for each answer
    max_tokens: int
    # Token sequences that end an answer; they are delivered, too.
    stop_sequences: Sequence[tuple[int, ...]]
    session: SessionRef | None = None
    # Positions in ``prompt`` that a later turn may return to: the end of the system prompt and, as
    # the last one, the end of the messages before the generation prompt. If a model's cache cannot
    # be trimmed, its state is copied at the first and the last.
    boundaries: Sequence[int] = ()
    top_logprobs: int | None = None  # None = no logprobs at all


@dataclass(frozen=True)
class PromptAdmitted:
    """The first event of every generation: the prompt has its place in a batch.

    It comes again, with another outcome, if the prompt shared another's prefill that ended early.
    """

    cache: CacheOutcome


@dataclass(frozen=True)
class PrefillProgress:
    """The progress of a prefill: ``done`` of the prompt's ``total`` tokens are in the cache."""

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
    """The last event of answer number ``index``; the reason is "cancelled" after ``stop``."""

    index: int
    reason: FinishReason


@dataclass(frozen=True)
class Failed:
    """The last event of all answers: the generation failed, as by a processor's error."""

    message: str


Event: TypeAlias = PromptAdmitted | PrefillProgress | Token | Finished | Failed


@dataclass(frozen=True)
class ModelFacts:
    """The properties of the loaded model that the HTTP side needs."""

    name: str
    max_context: int  # tokens, prompt and answer together
    vocab_size: int  # width of the logits
    hibernation: bool
    hibernation_reason: str = ""  # why ``hibernation`` is False
    usual_sampling: UsualSampling = UsualSampling()


class EventQueue:
    """The events of one generation; all but the constructor belongs to the event loop."""

    def __init__(self, num_answers: int, stop: Callable[[int | None], None]) -> None:
        """``stop(index)`` asks the owner to end an answer, ``stop(None)`` all of them.

        The reference to ``stop`` is dropped as soon as there is nothing to stop, since ``stop``
        refers to the request and the request to this queue. That cycle would keep every prompt in
        memory until Python's next full collection, which may be thousands of requests later.
        """
        self._num_open = num_answers
        self._stop = stop
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def deliver(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def events(self) -> AsyncIterator[Event]:
        """Yield events as they come, until all answers have ended or the generation failed."""
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
        """End one answer early, at a stop string; its slot is free before the next step."""
        self._stop(index)

    def cancel(self) -> None:
        """End all answers at once, as for a client that left; the computed KV is still saved."""
        self._stop(None)
        self._stop = _nothing


def _nothing(index: int | None) -> None:
    pass


class EventBuffer:
    """Collects the events of a round, to hand them to the event loop in one call.

    Belongs to the owner thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._addressed: list[tuple[EventQueue, Event]] = []

    def put(self, queue: EventQueue, event: Event) -> None:
        self._addressed.append((queue, event))

    def flush(self) -> None:
        """Deliver the collected events, in order."""
        if self._addressed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, self._addressed)
        self._addressed = []


def _deliver(addressed: list[tuple[EventQueue, Event]]) -> None:
    for queue, event in addressed:
        queue.deliver(event)
