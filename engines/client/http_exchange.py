"""One HTTP request to an engine, from its first byte to the last one of the response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

from engines.base import EngineStalled, EngineUnavailable, EngineUnreached
from engines.client.address import HttpAddress
from engines.client.http_response import HttpResponse
from engines.client.next_life import NextLife
from engines.client.stall_watchdog import StallWatchdog

log = logging.getLogger("thermocline.engines")

CONNECT_S = 5.0
ERROR_EVENT = b'data: {"error"'  # vLLM's first event, if its core died before it
END_OF_COMMENT = b"\n\n"  # of a comment that was cut, perhaps
MAX_KEPT_BYTES = 1 << 20  # of a body that is held to be sent once more; some 250,000 tokens of text


class HttpExchange:
    """A request and its response; an ``engines.base.Upstream``.

    An engine that ends before it has said anything of its answer, and is there again in time, is
    asked once more: the client sees a longer wait, not an error. Once: a request
    that its engine dies of is not to kill it for ever.

    A stream must show a sign of life every ``stall_timeout_s`` seconds. A response that comes whole
    has no such limit: ``EngineClient`` ends it with ``fail`` when the engine is found dead.
    """

    def __init__(
        self, address: HttpAddress, stall_timeout_s: float, next_life: NextLife | None = None
    ) -> None:
        """``next_life``: of the engine; None = it is asked but once."""
        self._address = address
        self._stall_timeout_s = stall_timeout_s
        self._next_life = next_life
        self._response = HttpResponse()
        self._kept: tuple[bytes, bytes] | None = None  # head and body, to be sent once more

    async def send(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send the request; ``head`` waits for the answer, for which a large body is not needed.

        Raises:
            EngineUnreached: no connection.
            ValueError: a header has more than one line.
        """
        request = self._address.request_head("POST", path, headers, len(body)), body
        if self._next_life is not None and len(body) <= MAX_KEPT_BYTES:
            self._kept = request
        try:
            await self._write(*request)
        except EngineUnavailable:
            if not await self._asked_again():
                raise

    async def _write(self, head: bytes, body: bytes) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                transport = await self._address.connect(self._response)
        except OSError as error:  # TimeoutError is one
            log.info("no connection to the engine: %s", error or type(error).__name__)
            raise EngineUnreached("it takes no connections") from error
        transport.write(head)
        transport.write(body)

    async def head(self) -> None:
        """Wait for the head of the response.

        Raises:
            EngineUnavailable: the connection ended, or ``fail`` was called.
        """
        try:
            await self._response.head()
        except EngineUnavailable:
            if not await self._asked_again():
                raise
        else:
            if self.status >= 500:  # perhaps vLLM's last words
                await self._asked_again()

    async def _asked_again(self) -> bool:
        """Ask once more if the engine ended and is there again, up to the head of the response.

        Returns whether it was; if not, what is here stays as it is.
        """
        request, self._kept = self._kept, None
        if request is None or self._next_life is None or not await self._next_life.ready():
            return False
        log.warning("the engine ended with a request, and is asked once more")
        self._response.close()
        self._response = HttpResponse()
        await self._write(*request)
        await self._response.head()
        return True

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    @property
    def is_stream(self) -> bool:
        return self._response.is_stream

    async def chunks(self) -> AsyncIterator[bytes]:
        """See ``engines.base.Upstream``."""
        watchdog, has_begun = self._watchdog(), False
        try:
            while True:
                watchdog.edges += 1
                failure, chunk = None, b""
                try:
                    chunk = await self._response.next_chunk()
                except EngineUnavailable as error:
                    failure = error
                watchdog.edges += 1  # what follows is the reader's time, not the engine's
                if self._kept is not None and (failure or self._is_last_word(chunk)):
                    watchdog.stop()
                    if await self._promised_again():
                        watchdog = self._watchdog()
                        if has_begun:
                            yield END_OF_COMMENT
                        continue
                if failure is not None:
                    raise failure
                if not chunk:
                    return
                if self._kept is not None and not is_comment(chunk):
                    self._kept = None
                has_begun = True
                yield chunk
        finally:
            watchdog.stop()

    def _watchdog(self) -> StallWatchdog:
        watchdog = StallWatchdog(self._stall_timeout_s, self._stalled)
        if not self.is_stream:
            watchdog.stop()
        return watchdog

    def _is_last_word(self, chunk: bytes) -> bool:
        """Say whether an engine that has ended sent no more than that."""
        ended = self._next_life is not None and self._next_life.ended
        return ended and (not chunk or chunk.startswith(ERROR_EVENT))

    async def _promised_again(self) -> bool:
        """Ask once more after a head that was read; the answer must be of the kind it said."""
        kind = self.status, self.is_stream
        asked = await self._asked_again()
        if asked and kind != (self.status, self.is_stream):
            raise EngineUnavailable(f"it came back, and answered with status {self.status}")
        return asked

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([chunk async for chunk in self.chunks()])

    def fail(self, failure: EngineUnavailable) -> None:
        """End the exchange now; its caller gets ``failure``."""
        self._response.fail(failure)

    def close(self) -> None:
        """Close the connection, which cancels the request in the engine if it still runs."""
        self._response.close()

    def _stalled(self) -> None:
        self.fail(EngineStalled(f"the engine sent nothing for {self._stall_timeout_s:g} s"))


def is_comment(chunk: bytes) -> bool:
    """Say whether a piece of a stream is a sign of life and nothing more."""
    return chunk.startswith(b":") and all(x[:1] in (b":", b"") for x in chunk.split(b"\n"))
