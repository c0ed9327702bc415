"""Passes the bytes of an engine's answer on to the client, with signs of life in a stream.

The relay calls ASGI directly, with one ``send`` per chunk. Backpressure reaches the engine: a
client that reads slowly makes ``send`` wait, then the engine's socket fills, so that no more than a
few socket buffers are held for one stream.

Some clients give up on a connection that is silent for a while, and send the request again. If the
dialect has a keep-alive event, it is sent whenever a stream has been silent for that long. If the
engine has not begun to answer by then, the head is sent without waiting for it; a failure after
that is reported by an event, not by a status.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Message, Send

from engines.base import EngineUnavailable, Upstream
from engines.client.connection import StallWatchdog
from engines.http import CACHE_HEADER, ClientGone
from engines.openai.requests import Json
from gateway.errors import Failure, failure_of
from gateway.relay.answer import ENGINE_FAILED, AnswerFormat, AnswerStream, TranslatedStream
from gateway.watch.requests import Usage

log = logging.getLogger("thermocline.gateway")
EVENT_STREAM = "text/event-stream"
SLICE_BYTES = 64 << 10  # of a whole answer; about as much as a connection buffers
Headers = Iterable[tuple[bytes, bytes]]
_TOO_LONG = "maximum context length"  # in vLLM's message for a prompt that exceeds the context
# A field and what is wrong with it, in the list of pydantic's errors that vLLM answers with.
_INVALID = re.compile(r"""'loc': '(?:body\.)?([^']+)', 'msg': (['"])(.*?)\2""")
# vLLM repeats the field and its value after the sentence: " (parameter=input_tokens, value=9)".
_REPEATED = re.compile(r" \((?:parameter|value)=.*\)$", re.DOTALL)
_INDEX = re.compile(r"\.(\d+)")
# The engine's headers that are passed on; no others.
_PASSED_ON = ("content-type", CACHE_HEADER)
# Headers of each event stream, without which some proxies would buffer it to its end.
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def is_event_stream(upstream: Upstream) -> bool:
    """Return whether the engine answers with a stream of events."""
    return upstream.headers.get("content-type", "").startswith(EVENT_STREAM)


def passed_on(upstream: Upstream) -> list[tuple[bytes, bytes]]:
    """Return the headers of the engine's answer that a client may see."""
    found = ((name, upstream.headers.get(name)) for name in _PASSED_ON)
    return [(name.encode(), value.encode("latin-1")) for name, value in found if value is not None]


async def relay_events(
    upstream: Upstream,
    events: AnswerStream,
    send: Send,
    *,
    ends_at: float,
    client_stall_s: float,
    on_chunk: Callable[[], object],
) -> Failure | None:
    """Pass a stream's events on until it ends; the caller sends the head before and the end after.

    Returns the failure that the caller has to report to the client; None if there was none.

    Args:
        ends_at: the time, by the event loop's clock, at which the stream is cut off.
        client_stall_s: how long the client may read nothing.
        on_chunk: called after each chunk of the engine was fed to ``events``.

    Raises:
        ClientGone: the client read nothing for ``client_stall_s`` seconds.
    """
    reader = asyncio.timeout(None)
    watchdog = StallWatchdog(client_stall_s, lambda: reader.reschedule(0.0))
    try:
        async with asyncio.timeout_at(ends_at), reader:
            async for chunk in upstream.chunks():
                body = events.feed(chunk)
                on_chunk()
                if not body:
                    continue
                watchdog.edges += 1
                await send(body_part(body))
                watchdog.edges += 1
    except (EngineUnavailable, TimeoutError) as error:
        if reader.expired():
            raise ClientGone from None
        return failure_of(error)
    finally:
        watchdog.stop()
    if events.words is not None:
        events.words.end()
    if not events.complete:
        return failure_of(EngineUnavailable("its answer broke off"))
    return None


def body_part(body: bytes) -> Message:
    """Return the ASGI message with a part of a body, which is not the last."""
    return {"type": "http.response.body", "body": body, "more_body": True}


async def send_head(send: Send, status: int, headers: Headers) -> None:
    """Send status and headers."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_end(send: Send, body: bytes) -> None:
    """Send the last bytes of the body, and end the response."""
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_whole(send: Send, headers: Headers, body: bytes, client_stall_s: float) -> None:
    """Send a complete answer in slices, so that a client that stops reading is noticed.

    Raises:
        ClientGone: the client read nothing for ``client_stall_s`` seconds.
    """
    await send_head(send, 200, [*headers, (b"content-length", str(len(body)).encode())])
    view = memoryview(body)
    while len(view) > SLICE_BYTES:
        message = {"type": "http.response.body", "body": bytes(view[:SLICE_BYTES])}
        await taken(send, {**message, "more_body": True}, client_stall_s)
        view = view[SLICE_BYTES:]
    last = {"type": "http.response.body", "body": bytes(view), "more_body": False}
    await taken(send, last, client_stall_s)


async def taken(send: Send, message: Message, client_stall_s: float) -> None:
    """Send a message. Raises ``ClientGone`` if the client reads nothing for so long."""
    try:
        async with asyncio.timeout(client_stall_s):
            await send(message)
    except TimeoutError:
        raise ClientGone from None


async def send_response(send: Send, response: Response) -> None:
    """Send a response whose body is complete, at once."""
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
    message = _REPEATED.sub("", message)
    if found := _INVALID.findall(message):
        param = _INDEX.sub(r"[\1]", found[0][0])
        message = f"{param}: {'; '.join(dict.fromkeys(x[2] for x in found))}"
    if status == 400 and not isinstance(code, str) and _TOO_LONG in message:
        param, code = "messages", "context_length_exceeded"  # vLLM names neither
    if status == 500 and not isinstance(code, str):
        log.warning("the engine failed: %s", message)  # of no use to the client
        return Failure(502, ENGINE_FAILED, None, "engine", 1.0)
    return Failure(
        status,
        message,
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
        1.0 if status in (429, 503) else None,
    )


class WithoutContent:
    """An engine's answer without its text. Implements ``engines.base.Upstream``."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    @property
    def status(self) -> int:
        return self._upstream.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._upstream.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        events = _EmptiedStream()
        async for chunk in self._upstream.chunks():
            if emptied := events.feed(chunk):
                yield emptied
        if events.complete:
            yield b"data: [DONE]\n\n"

    async def read(self) -> bytes:
        return _emptied(await self._upstream.read())


class _EmptiedStream(TranslatedStream):
    def translated(self, data: bytes) -> bytes:
        return b"data: " + _emptied(data) + b"\n\n"


def _emptied(data: bytes) -> bytes:
    """Remove the text from an answer or a chunk; return other data unchanged."""
    try:
        said = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    if not isinstance(said, dict) or "choices" not in said:
        return data
    for choice in said["choices"] or ():
        for name in ("message", "delta"):
            if isinstance(choice.get(name), dict):
                choice[name] = {"role": choice[name].get("role", "assistant"), "content": ""}
        if choice.get("finish_reason"):
            choice["finish_reason"] = "length"
        choice["logprobs"] = None
    if isinstance(usage := said.get("usage"), dict):
        usage |= {"completion_tokens": 0, "total_tokens": usage.get("prompt_tokens", 0)}
    return msgspec.json.encode(said)


class StreamOut:
    """Sends one streamed answer, with keep-alive events. Runs on the event loop."""

    def __init__(
        self,
        send: Send,
        send_body: Send,
        answer: AnswerFormat,
        *,
        head_sent: bool = False,
    ) -> None:
        """
        Args:
            send: sends the head.
            send_body: sends all between the head and the end.
            head_sent: True if the head was sent before the model was loaded.
        """
        self._send = send
        self._send_body = send_body
        self._answer = answer
        self._clock = asyncio.get_running_loop().time
        self._sign = answer.sign_of_life()
        self._head_sent = head_sent
        self._beginning = asyncio.Lock()
        self._last_sent = self._clock()
        self._events: AnswerStream | None = None
        # Keep-alive events depend on when the last bytes were sent; without them skip that step.
        self.send: Send = self._noted if self._sign else send_body

    @property
    def begun(self) -> bool:
        """True once the head was sent, or is being sent."""
        return self._events is not None

    @property
    def events(self) -> AnswerStream:
        """The answer's events; ``begin`` must have been called."""
        assert self._events is not None
        return self._events

    async def begin(self, headers: Headers, prompt: Usage | None = None) -> None:
        """Send the head and ``events.opening``, unless that was done.

        ``prompt`` has the prompt's token counts if they are known.
        """
        async with self._beginning:
            if self._events is not None:
                return
            self._events = self._answer.events(prompt)
            if not self._head_sent:
                await send_head(self._send, 200, [*headers, *STREAM_HEADERS])
            opening = self._events.opening()
            if opening:
                await self.send(body_part(opening))

    async def _noted(self, message: Message) -> None:
        self._last_sent = self._clock()
        await self._send_body(message)

    @asynccontextmanager
    async def showing_life(self, every_s: float, headers: Headers) -> AsyncIterator[None]:
        """Send a keep-alive event after each silence of ``every_s`` seconds inside the context.

        ``headers``: those of the head, if it is sent before the engine has begun to answer.
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
