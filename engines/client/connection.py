"""One HTTP/1.1 request to an engine on a connection of its own, and the response.

Each wait for bytes of a stream is limited; ``engines.client.second_try`` asks once more where that
is right.

Why not aiohttp's client: measured with 3.14.5, every read of its stream feeds the parser a second
time and resumes a transport that was never paused. With httptools (which uvicorn uses as well) and
nothing in between, a streamed chunk costs half as much when chunks come singly and 40 % when they
come in bursts. A connection per request costs little on a local socket, and there is no idle
connection that the engine may be closing while a request is being written to it.

Most of a chunk's cost is two system calls and two turns of the event loop, at any size. So a
stream that comes faster than any model's pace is read in bursts: after each chunk the engine's
socket is left alone for a moment, and the bytes that gather there go on as one chunk.
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

# A reader that is too slow makes the engine wait.
MAX_HELD_BYTES = 256 << 10
# The longest that a chunk of a fast stream waits in the socket, and the pause between two chunks
# below which a stream is fast. Streams of up to 160 events a second, and every first event, go on
# at once. Neither can be seen on a screen.
GATHER_S = 0.004
FAST_S = 1.5 * GATHER_S
CONNECT_S = 5.0  # over a network
AGAIN_S = 0.01  # between two tries while the engine's line of connections is full
# What the system says then, of a unix socket. macOS has no word of its own for it: an engine that
# has ended is known there by its control connection (``HttpResponse.fail``).
_LINE_FULL = (BlockingIOError, *((ConnectionRefusedError,) if sys.platform == "darwin" else ()))
_NO_FILES = (errno.EMFILE, errno.ENFILE)  # this process, or the system, has all that it may have
_BROKE = "the connection to it broke"


class HttpResponse(asyncio.Protocol):
    """A response being read: head first, then chunks of the body as they come. For one reader."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """``clock`` (in seconds) separates fast streams from slow ones; None = the event loop's."""
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
        self._read_at = 0.0  # the last chunk; by the clock
        self._has_head = False
        self._whole = False
        self._failure: EngineUnavailable | None = None

    # ---- for the reader

    async def head(self) -> None:
        """Wait until ``status`` and ``headers`` are there. Raises ``EngineUnavailable``."""
        while not self._has_head:
            await self._wait()

    async def next_chunk(self) -> bytes:
        """Return all bytes since the last call, at least one; b"" at the end of the body.

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
        """End the exchange now; the reader gets ``failure``."""
        if self._failure is None:
            self._failure = failure
        self.close()
        self._wake()

    def close(self) -> None:
        """Abort the connection, so that an engine still at work sees that it can stop."""
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
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only

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
        """Leave the socket alone for a while, or until the reader has caught up."""
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
        self._parser = None  # it refers to us: this breaks the reference cycle
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
    """Connects to an engine's data plane, and writes heads of requests to it."""

    def __init__(self, path: str, url: str = "", connect_s: float = CONNECT_S) -> None:
        """``url`` (http or https) is used if it is not empty, else the unix socket at ``path``.

        Raises:
            EngineError: ``url`` is neither.
        """
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise EngineError(f"engine.url must be like http://host:port, not {url!r}")
        self._path = "" if url else path
        self._connect_s = connect_s
        self._line = asyncio.Lock()  # of those that wait until the engine takes a connection
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._hostname = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._netloc = parts.netloc.rpartition("@")[2] or "engine"
        self._prefix = parts.path.rstrip("/")

    async def connect(self, response: HttpResponse) -> asyncio.Transport:
        """Open a connection whose incoming bytes go to ``response``.

        While more connections wait at the engine's socket than it lets wait, or no more files may
        be open here, this waits, too, one try at a time for all that do: its caller ends it, or
        ``response.fail``.

        Raises:
            OSError: nothing listens there; over a network also where no more files may be open.
                ``TimeoutError``: over a network, no connection within ``connect_s``, as where more
                wait than the engine lets wait.
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
        """Connect to the unix socket; None if that cannot be done now."""
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            try:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                # Not left to the loop: a unix socket connects at once or not at all, and asyncio's
                # takes "not now" for a connection that is under way.
                sock.connect(self._path)
                transport, _ = await loop.create_unix_connection(lambda: response, sock=sock)
            except OSError as error:
                if isinstance(error, _LINE_FULL) or error.errno in _NO_FILES:
                    return None
                raise
            stack.pop_all()  # the transport closes it
            return transport

    def request_head(
        self, method: str, path: str, headers: Mapping[str, str], num_body_bytes: int
    ) -> bytes:
        """Write a request's head, up to and with the blank line.

        Raises:
            ValueError: a header would be more than one line.
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

    Its user adds one to ``edges`` when a wait begins and when it ends, so it is odd during a wait.
    A look now and then shows whether it is still the same wait. This costs two additions per wait,
    where a timer would cost as much as relaying a chunk.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        """Start to look.

        Args:
            limit_s: the longest wait, in seconds; it is noticed up to a quarter later.
            give_up: called once, on the event loop, during such a wait.
        """
        self.edges = 0
        self._give_up = give_up
        self._gap_s = limit_s / LOOKS_PER_LIMIT
        self._seen = -1
        self._num_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._gap_s, self._look)

    def stop(self) -> None:
        """Look no more; ``give_up`` is not called any more."""
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

    A stream must show a sign of life every ``stall_timeout_s`` seconds. A response that comes whole
    has no such limit: ``EngineClient`` ends it with ``fail`` when the engine is found dead.
    """

    def __init__(self, address: HttpAddress, stall_timeout_s: float) -> None:
        super().__init__()
        self._address = address
        self._stall_timeout_s = stall_timeout_s

    async def send(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send the request; ``head`` waits for the answer, for which a large body is not needed.

        Raises:
            EngineUnreached: no connection.
            ValueError: a header has more than one line.
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
            transport.write(head + body)  # one call of the system for two
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
                watchdog.edges += 1  # what follows is the reader's time, not the engine's
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
