"""Reads what the owner thread generates for one HTTP request, until all choices have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from engines.mlx_worker.answer import Delta, ShownReason
from engines.mlx_worker.generation import (
    Admitted,
    CacheOutcome,
    ContextTooLong,
    Event,
    Failed,
    Finished,
    Generator,
    Overloaded,
    Prefill,
    Stream,
    Token,
)
from engines.mlx_worker.jobs import Job
from engines.openai import InvalidRequest


class GenerationFailed(Exception):
    """The engine could not go on with this request."""


@dataclass(frozen=True)
class Progress:
    """The prompt is still being read."""

    done: int
    total: int


@dataclass(frozen=True)
class Shown:
    choice: int
    delta: Delta


@dataclass(frozen=True)
class Ended:
    choice: int
    reason: ShownReason


Step: TypeAlias = Progress | Shown | Ended


class Reply:
    """Use as a context: leaving it early cancels what still runs."""

    def __init__(self, owner: Generator, job: Job) -> None:
        """Raises what ``Generator.submit`` raises; then nothing is left running."""
        self._job = job
        self._streams: list[Stream] = []
        try:
            for generation in job.generations:
                self._streams.append(owner.submit(generation))
        except (ContextTooLong, Overloaded):
            self._cancel()
            raise
        self._events = _merged(self._streams)
        self._unfinished = len(job.answers)
        self._stopping: set[int] = set()
        self.cached_tokens = 0

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._unfinished:
            self._cancel()
        await self._events.aclose()

    async def admitted(self) -> CacheOutcome:
        """Wait for the first prompt's place in a batch.

        Raises:
            GenerationFailed: it never got one.
        """
        number, event = await anext(self._events)
        if not isinstance(event, Admitted):
            self._raise_if_failed(event)
            raise GenerationFailed(f"expected a place in a batch, got {type(event).__name__}")
        self.cached_tokens += event.cache.cached_tokens
        return event.cache

    async def steps(self) -> AsyncIterator[Step]:
        """
        Raises:
            GenerationFailed: the engine could not go on.
            InvalidRequest: it could not because of the request's grammar.
        """
        async for number, event in self._events:
            self._raise_if_failed(event)
            for step in self._step(number, event):
                yield step
        if self._unfinished:
            raise GenerationFailed("the engine ended the request without finishing it")

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts of all choices; true at the end."""
        prompt = self._job.prompt_tokens
        completion = sum(answer.num_tokens for answer in self._job.answers)
        reasoning = sum(answer.num_reasoning_tokens for answer in self._job.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _step(self, number: int, event: Event) -> Sequence[Step]:
        match event:
            case Token():
                return self._take(number, event)
            case Finished():
                return self._end(number, event)
            case Prefill():
                return [Progress(event.done, event.total)]
            case Admitted():
                self.cached_tokens += event.cache.cached_tokens
        return []

    def _take(self, number: int, token: Token) -> Sequence[Step]:
        choice = number * self._job.num_rows + token.row
        answer = self._job.answers[choice]
        delta = answer.take(token)
        if answer.stopped and choice not in self._stopping:
            self._stopping.add(choice)
            self._streams[number].stop_row(token.row)
        return [Shown(choice, delta)] if delta else []

    def _end(self, number: int, finished: Finished) -> Sequence[Step]:
        choice = number * self._job.num_rows + finished.row
        if finished.reason == "cancelled" and choice not in self._stopping:
            raise GenerationFailed("it was ended because the engine is shutting down")
        delta, reason = self._job.answers[choice].finish(finished.reason)
        self._unfinished -= 1
        rest: list[Step] = [Shown(choice, delta)] if delta else []
        return [*rest, Ended(choice, reason)]

    def _raise_if_failed(self, event: Event) -> None:
        if not isinstance(event, Failed):
            return
        if any(grammar.failure for grammar in self._job.grammars):
            raise InvalidRequest(
                "The answer's grammar became too complex to enforce: simplify the JSON schema.",
                "response_format",
            )
        raise GenerationFailed(event.message)

    def _cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all streams as they come, each with its stream's number."""
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
    number: int, stream: Stream, arrived: asyncio.Queue[tuple[int, Event] | None]
) -> None:
    try:
        async for event in stream.events():
            arrived.put_nowait((number, event))
    finally:
        arrived.put_nowait(None)
