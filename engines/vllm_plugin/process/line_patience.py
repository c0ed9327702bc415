"""Gives up a request that has waited too long in vLLM's own queue, before its first step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from engines.openai.errors import InvalidRequest

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

RETRY_AFTER_S: Final = 1
# vLLM notices a client's departure by a disconnect message or by the cancellation of the task that
# serves the request. If the message has not ended the task after this long, the task is cancelled.
LEAVE_S: Final = 1.0


class Departure:
    """The receiving side of a client's connection, which can report that the client has left."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        """Return the next message, or a disconnect message after ``end`` was called."""
        coming = asyncio.ensure_future(self._receive())
        going = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({coming, going}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            for task in (coming, going):
                task.cancel()

    async def end(self, serving: asyncio.Task[None]) -> None:
        """Make the application abandon the request; return when it has."""
        self._gone.set()
        await asyncio.wait({serving}, timeout=LEAVE_S)
        serving.cancel()
        with suppress(asyncio.CancelledError, Exception):  # no client is left to get the error
            await serving


async def is_over(
    serving: asyncio.Task[None], begun: asyncio.Future[Any], patience_s: float
) -> bool:
    """Wait until a request begins to run or has ended; True if neither happens in time."""
    either: set[asyncio.Future[Any]] = {serving, begun}
    done, _ = await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    return not done


def overloaded(message: str) -> InvalidRequest:
    """Make the refusal of a request that the client should send again later."""
    return InvalidRequest(message, code="engine_overloaded", status=429)


async def refuse(send: Send, error: InvalidRequest) -> None:
    """Answer with an error in OpenAI's shape."""
    body = msgspec.json.encode(error.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if error.status == 429:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
