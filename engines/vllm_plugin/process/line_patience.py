"""Gives a request up that has waited too long in vLLM's own line, before its first step."""

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
# vLLM hears of a client that is gone in one of two ways; after this long it is informed in the
# other.
LEAVE_S: Final = 1.0


class Departure:
    """A client's side of the connection, from which it can be made to look gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        """Pass on what comes, or that the client is gone."""
        coming = asyncio.ensure_future(self._receive())
        going = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({coming, going}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            for task in (coming, going):
                task.cancel()

    async def end(self, serving: asyncio.Task[None]) -> None:
        """Have the application leave the request; returns when it has."""
        self._gone.set()
        await asyncio.wait({serving}, timeout=LEAVE_S)
        serving.cancel()
        with suppress(asyncio.CancelledError, Exception):  # no client is left to hear of it
            await serving


async def is_over(
    serving: asyncio.Task[None], begun: asyncio.Future[Any], patience_s: float
) -> bool:
    """Wait until a request begins to run or has ended; True if it did neither in time."""
    either: set[asyncio.Future[Any]] = {serving, begun}
    done, _ = await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    return not done


def overloaded(message: str) -> InvalidRequest:
    """Make the refusal of a request that is to come again."""
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
