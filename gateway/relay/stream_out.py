"""The client's side of a streamed answer: its head and opening once, and signs of life.

Some clients give up on a connection that shows nothing for a while, and send the same request again
after the first. A dialect that has an event for that purpose gets it whenever nothing else has
gone out for so long. If the engine has not even begun to answer by then, head and opening go out
without waiting for it; a failure after that is an event, not a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from starlette.types import Message, Send

from gateway.relay.answer_format import AnswerFormat, EventStream
from gateway.relay.passthrough import EVENT_STREAM, Headers, body_part, send_head

NO_CACHE = (b"cache-control", b"no-cache")


@runtime_checkable
class ShowsLife(Protocol):
    """An ``AnswerFormat`` of a dialect that has an event for "still at it"."""

    def sign_of_life(self) -> bytes:
        """Return that event; b"" for an answer that is not streamed."""


class StreamOut:
    """Sends one streamed answer, and notes its progress. Belongs to the event loop."""

    def __init__(
        self,
        send: Send,
        send_body: Send,
        answer: AnswerFormat,
        clock: Callable[[], float] | None = None,
        *,
        head_sent: bool = False,
    ) -> None:
        """
        Args:
            head_sent: the head went out before there was an engine to ask.
            send: for the head; ``send_body`` is for all between head and end.
            clock: in seconds; None = the event loop's.
        """
        self._send = send
        self._send_body = send_body
        self._answer = answer
        self._clock = clock or asyncio.get_running_loop().time
        self._sign = answer.sign_of_life() if isinstance(answer, ShowsLife) else b""
        self._head_sent = head_sent
        self._beginning = asyncio.Lock()
        self._last_sent = self._clock()
        self._events: EventStream | None = None
        # Who shows life needs to know when something went out; others need nothing between.
        self.send: Send = self._noted if self._sign else send_body

    @property
    def begun(self) -> bool:
        """True once head and opening are on their way."""
        return self._events is not None

    @property
    def events(self) -> EventStream:
        """The answer's events; ``begin`` has been called."""
        assert self._events is not None
        return self._events

    async def begin(self, headers: Headers) -> None:
        """Send head and opening, unless that was done."""
        async with self._beginning:
            if self._events is not None:
                return
            self._events = self._answer.events()
            if not self._head_sent:
                await send_head(self._send, 200, [*headers, NO_CACHE])
            opening = self._events.opening()
            if opening:
                await self.send(body_part(opening))

    async def _noted(self, message: Message) -> None:
        self._last_sent = self._clock()
        await self._send_body(message)

    @asynccontextmanager
    async def showing_life(self, every_s: float, headers: Headers) -> AsyncIterator[None]:
        """Show life whenever nothing went out for ``every_s`` seconds, until the context ends.

        ``headers``: of a head that goes out before the engine's answer has one.
        """
        if not self._sign:
            yield
            return
        showing = asyncio.create_task(self._show_life(every_s, headers), name="signs-of-life")
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    async def _show_life(self, every_s: float, headers: Headers) -> None:
        while True:
            quiet_s = self._clock() - self._last_sent
            if quiet_s < every_s:
                await asyncio.sleep(every_s - quiet_s)
            elif self.begun:
                async with self._beginning:
                    await self._noted(body_part(self._sign))
            else:
                await self.begin([(b"content-type", EVENT_STREAM.encode()), *headers])
