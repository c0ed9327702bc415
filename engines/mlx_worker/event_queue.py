"""Carries one generation's events from the owner thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from engines.mlx_worker.generation import Event, Failed, Finished


class EventQueue:
    """The reader's end; a ``GenerationStream``. All but the constructor is the event loop's."""

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
        """End one answer early."""
        self._stop(index)

    def cancel(self) -> None:
        """End all answers at once."""
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
