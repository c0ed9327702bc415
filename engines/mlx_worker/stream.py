"""One generation's events on their way from the owner thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from engines.mlx_worker.generation import Event, Failed, Finished


class EventStream:
    """The reader's end. Everything but the constructor is called on the event loop."""

    def __init__(self, num_rows: int, stop: Callable[[int | None], None]) -> None:
        """``stop(row)`` tells the owner to end a row, ``stop(None)`` all of them.

        It is let go of as soon as there is nothing to stop: it holds the request, and the request
        this stream. In that ring every prompt would stay until Python's next full collection,
        which a process with many long-lived objects puts off for thousands of requests.
        """
        self._open_rows = num_rows
        self._stop = stop
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def deliver(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def events(self) -> AsyncIterator[Event]:
        """Ends after the last row finished, or after ``Failed``."""
        while self._open_rows:
            await self._arrived.wait()
            self._arrived.clear()
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Finished):
                    self._open_rows -= 1
                elif isinstance(event, Failed):
                    self._open_rows = 0
                if not self._open_rows:
                    self._stop = _nothing
                yield event

    def stop_row(self, row: int) -> None:
        self._stop(row)

    def cancel(self) -> None:
        self._stop(None)
        self._stop = _nothing


def _nothing(row: int | None) -> None:
    pass


class Outbox:
    """Events collected during one step; one hop to the event loop carries them all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: list[tuple[EventStream, Event]] = []

    def put(self, stream: EventStream, event: Event) -> None:
        self._letters.append((stream, event))

    def send(self) -> None:
        if self._letters and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, self._letters)
        self._letters = []


def _deliver(letters: list[tuple[EventStream, Event]]) -> None:
    for stream, event in letters:
        stream.deliver(event)
