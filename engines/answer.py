"""One HTTP/1.1 answer on a connection of its own, read without ceremony.

Why not aiohttp's client: measured with 3.14.5, every read of its stream feeds the parser a second
time and resumes a transport that was never paused. With httptools (which uvicorn uses as well) and
nothing in between, a streamed chunk costs half as much when chunks come singly and 40 % when they
come in bursts. A connection per request costs little on a local socket, and there is no idle
connection that the engine may be closing while a request is being written to it.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools
from multidict import CIMultiDict

from engines.base import EngineUnavailable

# A reader that falls behind makes the engine wait.
MAX_HELD_BYTES = 256 << 10
_BROKE = "the connection to it broke"


class Answer(asyncio.Protocol):
    """Head first, then pieces of the body as they come. For one reader."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._has_head = False
        self._whole = False
        self._failure: EngineUnavailable | None = None

    # ---- for the reader

    async def head(self) -> None:
        """Until ``status`` and ``headers`` are there. Raises ``EngineUnavailable``."""
        while not self._has_head:
            await self._wait()

    async def piece(self) -> bytes:
        """What has come since the last call, at least one byte; b"" at the end of the body.

        Raises:
            EngineUnavailable: the connection ended before the body did, or ``fail`` was called.
        """
        while not self._pieces:
            if self._whole:
                return b""
            await self._wait()
        pieces, self._pieces = self._pieces, []
        self._held_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fail(self, failure: EngineUnavailable) -> None:
        """End the exchange now; who reads gets ``failure``."""
        if self._failure is None:
            self._failure = failure
        self.close()
        self._wake()

    def close(self) -> None:
        """An engine whose answer is not whole yet sees that nobody wants the rest."""
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
        if self._held_bytes > MAX_HELD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None  # it refers to us, we to it
        if self._ends_with_the_connection and exc is None:
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

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._held_bytes += len(piece)

    def on_message_complete(self) -> None:
        self._whole = True
