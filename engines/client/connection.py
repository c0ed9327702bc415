"""One HTTP/1.1 request to an engine on a connection of its own, and the response.

Each wait for bytes of a stream is limited in time. ``engines.client.second_try`` decides whether a
failed request is sent once more.

aiohttp's client is not used: measured with 3.14.5, every read of its stream feeds the parser a
second time and resumes a transport that was never paused. With httptools (which uvicorn uses as
well) alone, a streamed chunk costs half as much if chunks come singly, and 40 % if they come in
bursts. A connection per request costs little on a local socket, and there is no idle connection
that the engine may be closing while a request is being written to it.

Most of a chunk's cost is two system calls and two iterations of the event loop, whatever its size.
So a stream that is faster than any model is read in bursts: after each chunk, reading pauses for a
moment, and the bytes that gather in the socket are passed on as one chunk.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from typing import cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

from engines.base import EngineBusy, EngineError, EngineStalled, EngineUnavailable, EngineUnreached

# With more unread bytes than this, reading pauses, so a slow reader makes the engine wait.
MAX_HELD_BYTES = 256 << 10
# The longest wait of a fast stream's chunk in the socket, and the gap between two chunks below
# which a stream is fast. Streams of up to 160 events a second, and every first event, are passed on
# at once. The wait is too short to be seen on a screen.
GATHER_S = 0.004
FAST_S = 1.5 * GATHER_S
CONNECT_S = 5.0  # limit for connecting over a network
AGAIN_S = 0.01  # between two attempts while the engine's accept queue is full
# The errors of a unix socket whose accept queue is full. macOS gives the same error for a socket on
# which no process listens; there, the control connection shows that an engine has ended
# (``HttpResponse.fail``).
_LINE_FULL = (BlockingIOError, *((ConnectionRefusedError,) if sys.platform == "darwin" else ()))
_NO_FILES = (errno.EMFILE, errno.ENFILE)  # this process or the system may open no more files
_BROKE = "the connection to it broke"


class HttpResponse(asyncio.Protocol):
    """A response that one reader reads: the head first, then chunks of the body as they come."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """``clock`` returns seconds, to measure a stream's pace; None = the event loop's clock."""
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.is_stream = False
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._gathering: asyncio.TimerHandle | None = None
        self._read_at = 0.0  # time of the last chunk
        self._has_head = False
        self._whole = False
        self._failure: EngineUnavailable | None = None

    # ---- for the reader

    async def head(self) -> None:
        """Wait until ``status`` and ``headers`` are set. Raises ``EngineUnavailable``."""
        while not self._has_head:
            await self._wait()

    async def next_chunk(self) -> bytes:
        """Wait for bytes and return all since the last call; b"" at the end of the body.

        Raises:
            EngineUnavailable: the connection ended before the body did, or ``fail`` was called.
        """
        while not self._chunks:
            if self._whole:
                return b""
            await self._wait()
        chunks, self._chunks = self._chunks, []
        self._held_bytes = 0
        if self._paused and self._gathering is None:
            self._read_on()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def failed(self) -> bool:
        """True if ``fail`` was called, or the connection has broken."""
        return self._failure is not None

    def fail(self, failure: EngineUnavailable) -> None:
        """End the exchange now, and raise ``failure`` in the reader."""
        if self._failure is None:
            self._failure = failure
        self.close()
        self._wake()

    def close(self) -> None:
        """Abort the connection, so that an engine that still generates stops."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(EngineUnavailable(f"its answer is not HTTP: {error}"))
            return
        if self._chunks and not self._whole:
            self._pace()
        self._wake()

    def _pace(self) -> None:
        """Pause reading, if the stream is fast, for a moment or until the reader has caught up."""
        now = self._clock()
        is_fast, self._read_at = self.is_stream and now - self._read_at < FAST_S, now
        if is_fast and self._gathering is None:
            self._gathering = self._loop.call_later(GATHER_S, self._gathered)
        if is_fast or self._held_bytes > MAX_HELD_BYTES:
            self._leave_alone()

    def _gathered(self) -> None:
        self._gathering = None
        if self._held_bytes <= MAX_HELD_BYTES:
            self._read_on()

    def _leave_alone(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None  # breaks the reference cycle between parser and protocol
        if self._gathering is not None:
            self._gathering.cancel()
        if self._ends_with_the_connection and exc is None and self._failure is None:
            self._whole = True
        if not self._whole and self._failure is None:
            self._failure = EngineUnavailable(_BROKE)
        self._wake()

    @property
    def _ends_with_the_connection(self) -> bool:
        lengths = ("content-length", "transfer-encoding")
        return self._has_head and not any(name in self.headers for name in lengths)

    # ---- httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        self._has_head = True
        self.is_stream = self.headers.get("content-type", "").startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        self._whole = True


class HttpAddress:
    """The address of an engine's data plane: opens connections and encodes request heads."""

    def __init__(self, path: str, url: str = "", connect_s: float = CONNECT_S) -> None:
        """Use ``url`` (http or https) if it is not empty, else the unix socket at ``path``.

        Args:
            connect_s: limit for connecting to ``url``, in seconds.

        Raises:
            EngineError: ``url`` is not an http or https URL with a host.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # brackets or a port that are none
            parts, port = urlsplit(""), None
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise EngineError(f"engine.url must be like http://host:port, not {url!r}")
        self._path = "" if url else path
        self._connect_s = connect_s
        self._line = asyncio.Lock()  # held by the request whose turn it is to connect
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._hostname = parts.hostname or ""
        self._port = port or (443 if self._tls else 80)
        self._netloc = parts.netloc.rpartition("@")[2] or "engine"
        self._prefix = parts.path.rstrip("/")

    async def connect(self, response: HttpResponse) -> asyncio.Transport:
        """Open a connection whose incoming bytes go to ``response``; return its transport.

        On a unix socket, this waits while the engine's accept queue is full or no more files may be
        open here; the requests of this gateway then try one at a time. The wait ends only if the
        caller cancels it or ``response.fail`` is called.

        Raises:
            OSError: no process listens there; over a network, also if no more files may be open.
                ``TimeoutError``: over a network, no connection within ``connect_s``, for example
                because the engine's accept queue is full.
        """
        if not self._path:
            loop, tls = asyncio.get_running_loop(), self._tls
            async with asyncio.timeout(self._connect_s):
                opened, _ = await loop.create_connection(
                    lambda: response, self._hostname, self._port, ssl=tls
                )
                return opened
        if not self._line.locked() and (transport := await self._try_here(response)):
            return transport
        async with self._line:
            while not response.failed:
                if transport := await self._try_here(response):
                    return transport
                await asyncio.sleep(AGAIN_S)
        raise ConnectionAbortedError("the engine ended before it took the connection")

    async def _try_here(self, response: HttpResponse) -> asyncio.Transport | None:
        """Connect to the unix socket; None if it has no room or no more files may be open."""
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            try:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                # A unix socket connects at once or not at all, but asyncio's ``sock_connect`` takes
                # EAGAIN for a connection in progress.
                sock.connect(self._path)
                transport, _ = await loop.create_unix_connection(lambda: response, sock=sock)
            except OSError as error:
                if isinstance(error, _LINE_FULL) or error.errno in _NO_FILES:
                    return None
                raise
            stack.pop_all()  # the transport closes the socket from now on
            return transport

    def request_head(
        self, method: str, path: str, headers: Mapping[str, str], num_body_bytes: int
    ) -> bytes:
        """Return a request's head, including the blank line at its end.

        Raises:
            ValueError: a header contains a line break.
        """
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {num_body_bytes}", "connection: close"]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header of the engine's request has more than one line")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


LOOKS_PER_LIMIT = 4
_JOINED_BYTES = 64 << 10
log = logging.getLogger("thermocline.engines")


class StallWatchdog:
    """Notices a wait that lasts too long, without a timer for every wait.

    The user adds one to ``edges`` when a wait begins and when it ends, so the number is odd during
    a wait. Periodic checks show whether it is still the same wait. This costs two additions per
    wait; a timer would cost as much as relaying a chunk.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        """Start the periodic checks.

        Args:
            limit_s: the longest wait, in seconds; a longer one is noticed up to a quarter later.
            give_up: called once, on the event loop, during a wait that is too long.
        """
        self.edges = 0
        self._give_up = give_up
        self._gap_s = limit_s / LOOKS_PER_LIMIT
        self._seen = -1
        self._num_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._gap_s, self._look)

    def stop(self) -> None:
        """Stop the checks; ``give_up`` is not called any more."""
        self._timer.cancel()

    def _look(self) -> None:
        same_wait = self.edges % 2 == 1 and self.edges == self._seen
        self._num_looks = self._num_looks + 1 if same_wait else 0
        self._seen = self.edges
        if self._num_looks == LOOKS_PER_LIMIT:
            self._give_up()
        else:
            self._timer = self._loop.call_later(self._gap_s, self._look)


class HttpExchange(HttpResponse):
    """A request and its response; an ``engines.base.Upstream``.

    A stream must send something every ``stall_timeout_s`` seconds. A response that is not a stream
    has no such limit: ``EngineClient`` ends it with ``fail`` if the control connection is lost.
    """

    def __init__(self, address: HttpAddress, stall_timeout_s: float) -> None:
        super().__init__()
        self._address = address
        self._stall_timeout_s = stall_timeout_s

    async def send(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send the request, for whose answer ``head`` waits; the caller may then drop the body.

        Raises:
            EngineUnreached: no connection could be opened.
            ValueError: a header contains a line break.
        """
        head = self._address.request_head("POST", path, headers, len(body))
        try:
            transport = await self._address.connect(self)
        except OSError as error:  # TimeoutError is one
            log.info("no connection to the engine: %s", error or type(error).__name__)
            is_busy = isinstance(error, TimeoutError) or error.errno in _NO_FILES
            kind = EngineBusy if is_busy else EngineUnreached
            raise kind("it takes no connections") from error
        if len(body) <= _JOINED_BYTES:
            transport.write(head + body)  # one system call instead of two
        else:
            transport.write(head)
            transport.write(body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """See ``engines.base.Upstream``."""
        watchdog = StallWatchdog(self._stall_timeout_s, self._stalled)
        if not self.is_stream:
            watchdog.stop()
        try:
            while True:
                watchdog.edges += 1
                chunk = await self.next_chunk()
                watchdog.edges += 1  # from here the reader is at work, not the engine
                if not chunk:
                    return
                yield chunk
        finally:
            watchdog.stop()

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([chunk async for chunk in self.chunks()])

    def _stalled(self) -> None:
        self.fail(EngineStalled(f"the engine sent nothing for {self._stall_timeout_s:g} s"))
