"""A planned request, and the events of its choices until all of them have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from engines.host.work_line import QueueFull
from engines.http import CacheOutcome
from engines.mlx_worker.answer.output_processor import Delta, OutputProcessor, ShownReason
from engines.mlx_worker.generation import (
    Event,
    EventQueue,
    Failed,
    Finished,
    Generation,
    PrefillProgress,
    PromptAdmitted,
    Token,
)
from engines.mlx_worker.grammar import GrammarProcessor
from engines.openai.requests import InvalidRequest

if TYPE_CHECKING:
    from engines.mlx_worker.owner import Owner


@dataclass
class RequestPlan:
    """One HTTP request: a generation for each prompt, and an output processor for each choice.

    Choice ``i`` is answer ``i % num_choices`` of generation ``i // num_choices``.
    """

    num_choices: int  # of each prompt
    generations: list[Generation] = field(default_factory=list)
    outputs: list[OutputProcessor] = field(default_factory=list)
    grammars: list[GrammarProcessor] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(generation.prompt) for generation in self.generations)


class GenerationFailed(Exception):
    """The engine could not continue this request."""


@dataclass(frozen=True)
class ChoiceDelta:
    """More of choice number ``choice``."""

    choice: int
    delta: Delta


@dataclass(frozen=True)
class ChoiceEnd:
    """The end of choice number ``choice``."""

    choice: int
    reason: ShownReason
    stop: str | None = None  # the stop string that ended it


ReplyEvent: TypeAlias = PrefillProgress | ChoiceDelta | ChoiceEnd


class ReplyStream:
    """The events of all generations of a request in one stream; belongs to the event loop."""

    def __init__(self, owner: Owner, plan: RequestPlan) -> None:
        """Submit the plan's generations.

        Raises:
            InvalidRequest, QueueFull: a generation was refused; the others are cancelled.
        """
        self._plan = plan
        self._streams: list[EventQueue] = []
        try:
            for generation in plan.generations:
                self._streams.append(owner.submit(generation))
        except (InvalidRequest, QueueFull):
            self._cancel()
            raise
        self._events = _merged(self._streams)
        self._num_open = len(plan.outputs)
        self._stopping: set[int] = set()
        self._outcomes: dict[int, CacheOutcome] = {}  # by generation, the first admitted first

    async def aclose(self) -> None:
        """End the request; generations that still run are cancelled."""
        if self._num_open:
            self._cancel()
        await self._events.aclose()

    @property
    def outcome(self) -> CacheOutcome:
        """The cache outcome of the first admitted prompt; final only once the reply has ended."""
        return next(iter(self._outcomes.values()))

    async def admitted(self) -> None:
        """Wait for the first prompt's place in a batch.

        Raises:
            GenerationFailed: the request ended before.
        """
        number, event = await anext(self._events)
        if not isinstance(event, PromptAdmitted):
            self._raise_if_failed(event)
            raise GenerationFailed(f"expected a place in a batch, got {type(event).__name__}")
        self._outcomes[number] = event.cache

    async def events(self) -> AsyncIterator[ReplyEvent]:
        """Yield the events of the reply as they come, until all choices have ended.

        Raises:
            GenerationFailed: the engine could not continue.
            InvalidRequest: it could not continue because of the request's grammar.
        """
        async for number, event in self._events:
            self._raise_if_failed(event)
            for shown in self._shown(number, event):
                yield shown
        if self._num_open:
            raise GenerationFailed("the engine ended the request without finishing it")

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts over all choices; final only once the reply has ended."""
        prompt = self._plan.prompt_tokens
        completion = sum(output.num_tokens for output in self._plan.outputs)
        reasoning = sum(output.num_reasoning_tokens for output in self._plan.outputs)
        cached = sum(outcome.cached_tokens for outcome in self._outcomes.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _shown(self, number: int, event: Event) -> Iterator[ReplyEvent]:
        match event:
            case Token():
                choice = number * self._plan.num_choices + event.index
                output = self._plan.outputs[choice]
                delta = output.take(event)
                if output.stopped and choice not in self._stopping:
                    self._stopping.add(choice)
                    self._streams[number].stop(event.index)
                if delta:
                    yield ChoiceDelta(choice, delta)
            case Finished():
                choice = number * self._plan.num_choices + event.index
                if event.reason == "cancelled" and choice not in self._stopping:
                    raise GenerationFailed("it was ended because the engine is shutting down")
                output = self._plan.outputs[choice]
                delta, reason = output.finish(event.reason)
                self._num_open -= 1
                if delta:
                    yield ChoiceDelta(choice, delta)
                yield ChoiceEnd(choice, reason, output.stop)
            case PrefillProgress():
                yield event
            case PromptAdmitted():
                self._outcomes[number] = event.cache

    def _raise_if_failed(self, event: Event) -> None:
        if not isinstance(event, Failed):
            return
        if any(grammar.failure for grammar in self._plan.grammars):
            raise InvalidRequest(
                "The answer's grammar became too complex to enforce: simplify the JSON schema.",
                "response_format",
            )
        raise GenerationFailed(event.message)

    def _cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()


async def _merged(streams: Sequence[EventQueue]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all streams as they come, each with its stream's number."""
    if len(streams) == 1:
        async for event in streams[0].events():
            yield 0, event
        return
    arrived: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(i, x, arrived)) for i, x in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            item = await arrived.get()
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int, stream: EventQueue, arrived: asyncio.Queue[tuple[int, Event] | None]
) -> None:
    try:
        async for event in stream.events():
            arrived.put_nowait((number, event))
    finally:
        arrived.put_nowait(None)
