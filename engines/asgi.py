"""Common parts of the ASGI servers of gateway and engine: bounded bodies, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from engines.openai.errors import InvalidRequest

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection, or no longer reads from it."""


async def read_body(
    request: Request, max_bytes: int, on_size: Callable[[int], None] = lambda nbytes: None
) -> bytes:
    """Read the whole body. No more than the limit is ever held in memory.

    Args:
        on_size: called with the bytes that have come so far; what it raises ends the reading.

    Raises:
        InvalidRequest: 413, the body is larger than ``max_bytes``.
        starlette.requests.ClientDisconnect: the client left before the body was whole.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    nbytes = 0
    async for chunk in request.stream():
        nbytes += len(chunk)
        if nbytes > max_bytes:
            raise _too_large(max_bytes)
        on_size(nbytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"The request's body is larger than {max_bytes} bytes.", code="body_too_large", status=413
    )


async def while_client_stays(receive: Receive, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do ``work``, but cancel it as soon as the client disconnects.

    The request's body must have been read. ``work`` must not end the response: that end looks like
    a disconnect from here. ``work`` runs in a task of its own, with a short stack: resuming a
    coroutine costs time for every frame that awaits it, and below a route's handler there are
    twenty of them.

    Raises:
        ClientGone: the client disconnected. ``work`` has ended by then.
    """
    working = asyncio.create_task(work())
    watching = asyncio.create_task(_cancel_when_gone(receive, working))
    try:
        return await working
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if this is not None and this.cancelling():
            raise
        raise ClientGone from None
    finally:
        watching.cancel()


async def _cancel_when_gone(receive: Receive, working: asyncio.Task[T]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    working.cancel()
