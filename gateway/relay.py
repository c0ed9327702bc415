"""The engine's answer on its way to the client: raw bytes, nothing in between.

The relay speaks ASGI directly, one ``send`` per chunk. Both sides push back: a client that reads
slowly makes ``send`` wait, then the engine's socket fills, so no more than a few socket buffers
are ever held for one stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Send

from engines.base import EngineUnavailable, Upstream
from engines.openai import Json
from engines.patience import Patience
from engines.wire import CACHE_HEADER
from gateway.errors import Failure, failure_of
from gateway.events import EventStream

log = logging.getLogger("thermocline.gateway")

EVENT_STREAM = "text/event-stream"
PIECE_BYTES = 64 << 10  # of a whole answer; about what a connection holds before it pushes back
Headers = Iterable[tuple[bytes, bytes]]
# Of the engine's own headers only these go on.
_PASSED_ON = ("content-type", CACHE_HEADER)
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to be answered, or nobody takes what is sent."""


async def while_client_stays(receive: Receive, work: Callable[[], Coroutine[None, None, T]]) -> T:
    """Do ``work``, but cancel it as soon as the client disconnects.

    ``work`` must not end the response: its end looks like a disconnect from here. It runs in a
    task of its own, with a short stack: resuming a coroutine costs time for every frame that
    awaits it, and below a route's handler there are twenty of them.

    Raises:
        ClientGone: the client disconnected.
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


def is_event_stream(upstream: Upstream) -> bool:
    return upstream.headers.get("content-type", "").startswith(EVENT_STREAM)


def passed_on(upstream: Upstream) -> list[tuple[bytes, bytes]]:
    """The headers of the engine that a client may see."""
    found = ((name, upstream.headers.get(name)) for name in _PASSED_ON)
    return [(name.encode(), value.encode("latin-1")) for name, value in found if value is not None]


async def relay_events(
    upstream: Upstream,
    send: Send,
    *,
    deadline: float,
    client_stall_s: float,
    on_first: Callable[[], None],
) -> tuple[EventStream, Failure | None]:
    """Pass a stream on until it ends; the head was sent before, the end is sent afterwards.

    ``deadline`` is a time of the event loop's clock. ``on_first`` is called after the first event.
    The ``Failure`` is what the client has still to be told.

    Raises:
        ClientGone: the client took nothing for ``client_stall_s`` seconds.
    """
    events = EventStream()
    try:
        async with asyncio.timeout_at(deadline):
            await _pump(upstream, events, send, client_stall_s, on_first)
    except (EngineUnavailable, TimeoutError) as error:
        return events, failure_of(error)
    if not events.complete:
        return events, failure_of(EngineUnavailable("its answer broke off"))
    return events, None


async def _pump(
    upstream: Upstream,
    events: EventStream,
    send: Send,
    client_stall_s: float,
    on_first: Callable[[], None],
) -> None:
    reader = asyncio.timeout(None)
    patience = Patience(client_stall_s, lambda: reader.reschedule(0.0))
    waiting_for_first = True
    try:
        async with reader:
            async for chunk in upstream.chunks():
                body = events.feed(chunk)
                if not body:
                    continue
                patience.moves += 1
                await send({"type": "http.response.body", "body": body, "more_body": True})
                patience.moves += 1
                if waiting_for_first and events.begun:
                    waiting_for_first = False
                    on_first()
    except TimeoutError:
        if reader.expired():
            raise ClientGone from None
        raise
    finally:
        patience.stop()


async def send_head(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_whole(send: Send, headers: Headers, body: bytes, client_stall_s: float) -> None:
    """An answer that is there, in pieces, so that its reader is seen to take it.

    Raises:
        ClientGone: the client took nothing for ``client_stall_s`` seconds.
    """
    await send_head(send, 200, [*headers, (b"content-length", str(len(body)).encode())])
    view = memoryview(body)
    while len(view) > PIECE_BYTES:
        message = {"type": "http.response.body", "body": bytes(view[:PIECE_BYTES])}
        await _taken(send, {**message, "more_body": True}, client_stall_s)
        view = view[PIECE_BYTES:]
    last = {"type": "http.response.body", "body": bytes(view), "more_body": False}
    await _taken(send, last, client_stall_s)


async def _taken(send: Send, message: Message, client_stall_s: float) -> None:
    try:
        async with asyncio.timeout(client_stall_s):
            await send(message)
    except TimeoutError:
        raise ClientGone from None


async def send_response(send: Send, response: Response) -> None:
    """One whose body is there, at once."""
    await send_head(send, response.status_code, response.raw_headers)
    await send_end(send, bytes(response.body))


def engine_failure(status: int, body: bytes) -> Failure:
    """An engine's error answer, in OpenAI's shape whatever shape it came in."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    if status == 401 or not isinstance(error, dict):  # 401: about our token, not the client's key
        return Failure(max(status, 502), f"The engine failed (status {status}).", None, "engine")
    return _failure_from(status, error)


def _failure_from(status: int, error: Json) -> Failure:
    param, code, message = error.get("param"), error.get("code"), str(error.get("message", ""))
    if status == 500 and not isinstance(code, str):
        log.warning("the engine failed: %s", message)  # for who runs it; a client can do nothing
        return Failure(502, "The engine failed; its log says why. Try again.", None, "engine", 1.0)
    return Failure(
        status,
        message,
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
        1.0 if status in (429, 503) else None,
    )
