"""One HTTP request to an engine, from its first byte to the last one of the response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

from engines.base import EngineStalled, EngineUnavailable
from engines.client.address import HttpAddress
from engines.client.http_response import HttpResponse
from engines.client.stall_watchdog import StallWatchdog

log = logging.getLogger("thermocline.engines")

CONNECT_S = 5.0


class HttpExchange:
    """A request and its response; an ``engines.base.Upstream``.

    A stream must show a sign of life every ``stall_timeout_s`` seconds. A response that comes whole
    has no such limit: ``EngineClient`` ends it with ``fail`` when the engine is found dead.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._response = HttpResponse()

    async def send(
        self, address: HttpAddress, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Send the request; ``head`` waits for the answer, for which the body is not needed.

        Raises:
            EngineUnavailable: no connection.
            ValueError: a header has more than one line.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                transport = await address.connect(self._response)
        except OSError as error:  # TimeoutError is one
            log.info("no connection to the engine: %s", error or type(error).__name__)
            raise EngineUnavailable("it takes no connections") from error
        transport.write(address.request_head("POST", path, headers, len(body)))
        transport.write(body)

    async def head(self) -> None:
        """Wait for the head of the response.

        Raises:
            EngineUnavailable: the connection ended, or ``fail`` was called.
        """
        await self._response.head()

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
        next_chunk = self._response.next_chunk
        watchdog = StallWatchdog(self._stall_timeout_s, self._stalled)
        if not self.is_stream:
            watchdog.stop()
        try:
            while True:
                watchdog.edges += 1
                chunk = await next_chunk()
                watchdog.edges += 1  # what follows is the reader's time, not the engine's
                if not chunk:
                    return
                yield chunk
        finally:
            watchdog.stop()

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([chunk async for chunk in self.chunks()])

    def fail(self, failure: EngineUnavailable) -> None:
        """End the exchange now; whoever waits for it gets ``failure``."""
        self._response.fail(failure)

    def close(self) -> None:
        """Close the connection, which cancels the request in the engine if it still runs."""
        self._response.close()

    def _stalled(self) -> None:
        self.fail(EngineStalled(f"the engine sent nothing for {self._stall_timeout_s:g} s"))
