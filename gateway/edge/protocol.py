r"""uvicorn's HTTP/1.1 protocol, with every part of a request bounded on every path.

    idle -> head -> body -> framing and trailers -> idle       each with a timeout and a limit
                     \-> answered before it was complete -> rest dropped for a while -> closed

uvicorn sets no limits after a head, treats trailers as headers, and keeps a connection whose client
never completes its request. Here a request that was answered early ends its connection, trailers
are ignored, and a client that does not read its answer is cut off.

A request is a head, a body, and for chunked bodies framing and trailers around it. httptools, the
parser, bounds none of them, and buffers each name and value until it is complete. So all bytes
outside the body are counted, from the last byte of body on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.config import GatewayConfig
from gateway.edge.connections import (
    AnswerTransport,
    Connections,
    HalfClosed,
    Lingering,
    WithoutChunks,
    close_soon,
)
from gateway.errors import Failure

MAX_HEADER_BYTES = 32 << 10
MAX_FIELDS = 200  # header lines, and as many trailer lines
HEAD_TIMEOUT_S = 20.0  # shorter than for bodies, which may be large
# Bytes on the wire for each byte of body: a chunk of one byte takes six.
WIRE_PER_BODY = 8
log = logging.getLogger("thermocline.gateway")
MAX_PIPELINED = 32  # requests that wait for the one that is being answered
APP_FIRST_S = 0.5  # lets the app's own timeout, which began later, answer with a better message
_HEAD_TOO_LARGE = Failure(431, "The request's head is too large.", None, "head_too_large")
_TOO_MANY_FIELDS = Failure(431, "The request has too many header lines.", None, "head_too_large")
_TOO_MUCH_AROUND = Failure(
    400, "The request has too many bytes around its body.", None, "framing_too_large"
)
_HEAD_LATE = Failure(408, "The request's head took too long.", None, "head_timeout")
_BODY_LATE = Failure(408, "The request's body took too long to arrive.", None, "body_timeout")
_NO_PLACE = Failure(503, "This server has too many connections.", None, "too_many_connections", 2.0)
Fields = Sequence[tuple[bytes, bytes]]


class RequestBounds:
    """The limits of the request that a connection is receiving, and its counts so far."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._max_wire_bytes = WIRE_PER_BODY * limits.max_body_bytes + MAX_HEADER_BYTES
        self.restart()

    def restart(self) -> None:
        """Reset the counts for the next request, which begins with a head."""
        self.in_head = True
        self._num_fields = 0
        self._beside_body_bytes = 0  # since the last byte of body
        self._wire_bytes = 0

    def received(self, nbytes: int) -> None:
        """Count received bytes, before the parser has seen them."""
        self._beside_body_bytes += nbytes
        self._wire_bytes += nbytes

    def field(self) -> bool:
        """Count a header or trailer line; return False if there are too many."""
        self._num_fields += 1
        return self._num_fields <= MAX_FIELDS

    def head_ended(self, nbytes: int) -> bool:
        """Note that the head is complete; return False if its ``nbytes`` are too many."""
        self.in_head = False
        self._num_fields = 0
        self._beside_body_bytes = self._wire_bytes = 0
        return nbytes <= MAX_HEADER_BYTES

    def body(self) -> None:
        """Note that bytes of the body were received."""
        self._beside_body_bytes = 0

    @property
    def exceeded(self) -> bool:
        """True if the head, or the framing and trailers of the body, have become too large."""
        return self._beside_body_bytes > MAX_HEADER_BYTES or self._wire_bytes > self._max_wire_bytes


class EdgeProtocol(HttpToolsProtocol):
    """One connection. ``server.server_of`` makes the subclass with ``limits`` and ``places``."""

    limits: GatewayConfig
    places: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served = self.app
        self._bounds = RequestBounds(self.limits)
        self._part_timer: asyncio.TimerHandle | None = None  # for the head or body being received
        self._reader_timer: asyncio.TimerHandle | None = None  # while the client reads nothing
        self._unsent_bytes = 0
        self._begun = False  # True: the first bytes of the next request are here
        self._whole = True  # False: a request's head is here, and its body is not complete
        self._failure: Failure | None = None
        self._reusable = False  # the request allows to keep the connection alive
        self._ending = False
        self._cycles: deque[RequestResponseCycle] = deque()  # not answered yet, oldest first
        self._lingering: Lingering | None = None
        self._half_closed: HalfClosed | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        for_admins = self.limits.is_for_admins(self.server)
        refused = self.places.admit(self, address, for_admins=for_admins)
        if refused:  # it must not hold a file any longer
            transport.write(_answer(_NO_PLACE))
            close_soon(self.loop, transport)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
        self._stop_clock()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        for watch in (self._lingering, self._half_closed):
            if watch is not None:
                watch.stop()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn notifies the newest only
            cycle.disconnected = True
            cycle.message_event.set()

    def evict(self) -> None:
        """Close this idle connection, as another needs its place."""
        close_soon(self.loop, self.transport)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for a client that still waits for its answer."""
        if self._half_closed is not None:
            return True
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and self._whole
        waits = waits and (not cycle.response_started or cycle.chunked_encoding is True)
        if not waits or self._lingering:
            return False
        cycle.keep_alive = False
        self._half_closed = HalfClosed(self.loop, self.transport, self._write_ahead)
        return True

    def _write_ahead(self) -> None:
        if not self._cycles:
            return
        cycle = self._cycles[0]
        answer = cast(AnswerTransport, cycle.transport)
        if not cycle.response_started:
            answer.write_ahead()
        elif cycle.chunked_encoding:
            answer.write_zero()

    def shutdown(self) -> None:
        self._ending = True
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        close_soon(self.loop, self.transport)

    # ---- what comes in

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._lingering.received(len(data))
            return
        if self.transport.is_closing():
            return
        if not self._begun:
            self._begin()
        self._bounds.received(len(data))
        super().data_received(data)
        if self._begun and self._bounds.exceeded and self._lingering is None:
            self._cut(_HEAD_TOO_LARGE if self._bounds.in_head else _TOO_MUCH_AROUND)

    def _begin(self) -> None:
        """Note the first byte of a request; start the head's timeout if none runs."""
        self._begun = True
        self.places.busy(self)
        if self._part_timer is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._begun:  # a pipelined request, in the same bytes as the one before
            self._begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._bounds.field():
            self._object(_TOO_MANY_FIELDS)
        if self._bounds.in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        nbytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if not self._bounds.head_ended(nbytes):
            self._object(_HEAD_TOO_LARGE)
        version = self.parser.get_http_version()
        if words := objection(self.parser.get_method(), self.url, version, self.headers):
            self._object(Failure(400, words, None, "bad_http"))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._object(Failure(400, "Too many requests wait for an answer.", None, "bad_http"))
        self._whole = False
        self._time(self.limits.body_timeout_s + APP_FIRST_S, self._body_late)
        self.app = self._answer_without_chunks if version == "1.0" else self._served
        super().on_headers_complete()
        cycle = self.cycle
        answer = AnswerTransport(self.transport, self._answered_last, self.loop)
        cycle.transport = answer  # type: ignore[assignment]
        # Until the request is complete: an answer that begins before that ends the connection.
        self._reusable, cycle.keep_alive = cycle.keep_alive, False
        self._cycles.append(cycle)

    async def _answer_without_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for the oldest request, which came by HTTP/1.0."""
        cycle = self._cycles[0]
        cycle.waiting_for_100_continue = False  # HTTP/1.0 has no such answer
        await self._served(scope, receive, WithoutChunks(cycle, send).send)

    def on_body(self, body: bytes) -> None:
        self._bounds.body()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_clock()
        self._begun, self._whole = False, True
        self._bounds.restart()
        if not self.cycle.response_started and self._reusable and not self._ending:
            self.cycle.keep_alive = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        if self._lingering is not None:
            return
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        if not self._begun and not self.pipeline:
            self.places.idle(self)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an offer to upgrade to WebSocket or HTTP/2, as RFC 9110 (7.8) allows.

        uvicorn would log the advice to install a library.
        """
        log.debug("an offer to upgrade the protocol was ignored")

    # ---- clocks

    def _await_head(self) -> None:
        self._time(min(HEAD_TIMEOUT_S, self.limits.body_timeout_s), self._head_late)

    def _time(self, seconds: float, late: Any) -> None:
        self._stop_clock()
        self._part_timer = self.loop.call_later(seconds, late)

    def _stop_clock(self) -> None:
        if self._part_timer is not None:
            self._part_timer.cancel()
            self._part_timer = None

    def _head_late(self) -> None:
        self._cut(_HEAD_LATE)

    def _body_late(self) -> None:
        if self.flow.read_paused:  # the app has paused reading, so the client is not late
            self._time(self.limits.body_timeout_s, self._body_late)
        else:
            self._cut(_BODY_LATE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _await_reader(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self.limits.client_stall_s, self._reader_late)

    def _reader_late(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_reader()
            return
        self.places.ended("reader_stalled")
        self.transport.abort()

    # ---- the end

    def _answered_last(self) -> None:
        """End the connection after an answer was written; first drop the rest of its request."""
        if self._whole or self.transport.is_closing():
            close_soon(self.loop, self.transport)
        elif self._lingering is None:
            self._stop_clock()
            self.flow.resume_reading()
            self._lingering = Lingering(self.loop, self.transport)

    def _object(self, failure: Failure) -> None:
        """Stop the parsing with ``failure``; the parser then calls ``send_400_response``."""
        self._failure = failure
        raise ValueError(failure.message)

    def send_400_response(self, msg: str) -> None:
        self._cut(self._failure or Failure(400, msg, None, "bad_http"))

    def _cut(self, failure: Failure) -> None:
        """End a connection whose client broke a limit or the protocol.

        ``failure`` is sent only if no earlier answer is due, and none to this request has begun.
        """
        self._stop_clock()
        if self.transport.is_closing() or self._lingering is not None:
            return
        self.places.ended(failure.code or "bad_http")
        unanswered = [cycle for cycle in self._cycles if cycle is not self._receiving]
        if unanswered or (self._receiving is not None and self._receiving.response_started):
            self.transport.abort()
            return
        self.transport.write(_answer(failure))
        self.flow.resume_reading()
        self._lingering = Lingering(self.loop, self.transport)
        if self._receiving is not None:  # the app must not write its answer after this one
            self._receiving.disconnected = True
            self._receiving.message_event.set()

    @property
    def _receiving(self) -> RequestResponseCycle | None:
        """The request whose head is here and whose body is not complete; None if there is none."""
        return None if self._whole else self.cycle


def _answer(failure: Failure) -> bytes:
    body = failure.json()
    retry = f"retry-after: {failure.retry_after_s:.0f}\r\n" if failure.retry_after_s else ""
    head = (
        f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}\r\n"
        f"content-type: application/json\r\n{retry}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def objection(method: bytes, target: bytes, version: str, fields: Fields) -> str:
    """Return in a sentence why a head is ambiguous or not served here; "" if it is accepted.

    Args:
        fields: pairs of a name in lower case and a value.
    """
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) > 1:
        return "The request has more than one Host header."
    if version == "1.0" and any(name == b"transfer-encoding" for name, _ in fields):
        return "HTTP/1.0 has no Transfer-Encoding."
    if target.startswith(b"/") or (method == b"OPTIONS" and target == b"*"):
        return ""
    if method == b"CONNECT":
        return "This server is no proxy."
    return _objection_to_absolute(target, hosts)


def _objection_to_absolute(target: bytes, hosts: Sequence[bytes]) -> str:
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return "The request's target is neither a path nor a URL."
    if url.schema not in (b"http", b"https") or not url.host or url.userinfo:
        return "The request's target is neither a path nor a URL."
    authority = url.host if url.port is None else b"%s:%d" % (url.host, url.port)
    named = hosts[0].strip().lower().replace(b"[", b"").replace(b"]", b"") if hosts else b""
    if authority.lower() != named:
        return "The request's target and its Host header name different servers."
    return ""
