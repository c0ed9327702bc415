"""Passes the bytes of an engine's answer on to the client as they are.

The relay speaks ASGI directly, one ``send`` per chunk. Backpressure reaches the engine: a client
that reads slowly makes ``send`` wait, then the engine's socket fills, so no more than a few socket
buffers are ever held for one stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Message, Send

from engines.asgi import ClientGone
from engines.base import EngineUnavailable, Upstream
from engines.client.http_exchange import StallWatchdog
from engines.headers import CACHE_HEADER
from engines.openai.requests import Json
from gateway.errors import Failure, failure_of
from gateway.relay.answer_format import EventStream

log = logging.getLogger("thermocline.gateway")
EVENT_STREAM = "text/event-stream"
SLICE_BYTES = 64 << 10  # of a whole answer; about what a connection holds before it pushes back
Headers = Iterable[tuple[bytes, bytes]]
_TOO_LONG = "maximum context length"  # vLLM's words for a prompt beyond it
# The engine's headers that are passed on; no others.
_PASSED_ON = ("content-type", CACHE_HEADER)


class Deadline:
    """A time of the event loop's clock, in seconds. Belongs to the event loop."""

    def __init__(self, at: float) -> None:
        self.at = at
        self._limit: asyncio.Timeout | None = None  # what was entered last

    def put_off(self, at: float) -> None:
        """Let what runs go on until ``at``, if that is later."""
        self.at = max(self.at, at)
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self.at)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Raise ``TimeoutError`` inside the context at that time.

        A context within such a one takes its place, and ends by itself.
        """
        if self._limit is not None:
            self._limit.reschedule(None)
        async with asyncio.timeout_at(self.at) as self._limit:
            try:
                yield
            finally:
                self._limit = None


def is_event_stream(upstream: Upstream) -> bool:
    """Say whether the engine answers with a stream of events."""
    return upstream.headers.get("content-type", "").startswith(EVENT_STREAM)


def passed_on(upstream: Upstream) -> list[tuple[bytes, bytes]]:
    """Return the headers of the engine's answer that a client may see."""
    found = ((name, upstream.headers.get(name)) for name in _PASSED_ON)
    return [(name.encode(), value.encode("latin-1")) for name, value in found if value is not None]


async def relay_events(
    upstream: Upstream,
    events: EventStream,
    send: Send,
    *,
    deadline: Deadline,
    client_stall_s: float,
    on_chunk: Callable[[bytes], None],
) -> Failure | None:
    """Pass a stream's events on until it ends; the caller sends the head before and the end after.

    Returns the failure that still has to be sent to the client, if any.

    Args:
        deadline: when it breaks off.
        client_stall_s: how long the client may take nothing.
        on_chunk: called with the engine's bytes as they come.

    Raises:
        ClientGone: the client took nothing for ``client_stall_s`` seconds.
    """
    try:
        async with deadline.kept():
            await _pump(upstream, events, send, client_stall_s, on_chunk)
    except (EngineUnavailable, TimeoutError) as error:
        return failure_of(error)
    if not events.complete:
        return failure_of(EngineUnavailable("its answer broke off"))
    return None


async def _pump(
    upstream: Upstream,
    events: EventStream,
    send: Send,
    client_stall_s: float,
    on_chunk: Callable[[bytes], None],
) -> None:
    reader = asyncio.timeout(None)
    watchdog = StallWatchdog(client_stall_s, lambda: reader.reschedule(0.0))
    try:
        async with reader:
            async for chunk in upstream.chunks():
                on_chunk(chunk)
                body = events.feed(chunk)
                if not body:
                    continue
                watchdog.edges += 1
                await send(body_part(body))
                watchdog.edges += 1
    except TimeoutError:
        if reader.expired():
            raise ClientGone from None
        raise
    finally:
        watchdog.stop()


def body_part(body: bytes) -> Message:
    """Make the message of some bytes of a body that goes on."""
    return {"type": "http.response.body", "body": body, "more_body": True}


async def send_head(send: Send, status: int, headers: Headers) -> None:
    """Send status and headers."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_end(send: Send, body: bytes) -> None:
    """Send the last bytes of the body, and end the response."""
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_whole(send: Send, headers: Headers, body: bytes, client_stall_s: float) -> None:
    """Send an answer whose body is there, slice by slice, so that its reader is seen to take it.

    Raises:
        ClientGone: the client took nothing for ``client_stall_s`` seconds.
    """
    await send_head(send, 200, [*headers, (b"content-length", str(len(body)).encode())])
    view = memoryview(body)
    while len(view) > SLICE_BYTES:
        message = {"type": "http.response.body", "body": bytes(view[:SLICE_BYTES])}
        await _taken(send, {**message, "more_body": True}, client_stall_s)
        view = view[SLICE_BYTES:]
    last = {"type": "http.response.body", "body": bytes(view), "more_body": False}
    await _taken(send, last, client_stall_s)


async def _taken(send: Send, message: Message, client_stall_s: float) -> None:
    try:
        async with asyncio.timeout(client_stall_s):
            await send(message)
    except TimeoutError:
        raise ClientGone from None


async def send_response(send: Send, response: Response) -> None:
    """Send a response whose body is there, in one go."""
    await send_head(send, response.status_code, response.raw_headers)
    await send_end(send, bytes(response.body))


def engine_failure(status: int, body: bytes) -> Failure:
    """Translate an engine's error answer of any shape into OpenAI's."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    if status == 401 or not isinstance(error, dict):  # 401 is about our token, not the client's key
        return Failure(max(status, 502), f"The engine failed (status {status}).", None, "engine")
    return _failure_from(status, error)


def _failure_from(status: int, error: Json) -> Failure:
    param, code, message = error.get("param"), error.get("code"), str(error.get("message", ""))
    if status == 400 and not isinstance(code, str) and _TOO_LONG in message:
        param, code = "messages", "context_length_exceeded"  # vLLM names neither
    if status == 500 and not isinstance(code, str):
        log.warning("the engine failed: %s", message)  # for the operator; a client can do nothing
        return Failure(502, "The engine failed; its log says why. Try again.", None, "engine", 1.0)
    return Failure(
        status,
        message,
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
        1.0 if status in (429, 503) else None,
    )
