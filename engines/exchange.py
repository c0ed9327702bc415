"""One request to an engine, from its first byte to the last of the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping

import aiohttp

from engines.base import EngineStalled, EngineUnavailable
from engines.patience import Patience

log = logging.getLogger("thermocline.engines")


class Exchange:
    """An ``engines.base.Upstream``.

    A stream must show a sign of life every ``stall_timeout_s`` seconds. An answer that comes whole
    has no such clock: its owner ends it with ``fail`` when the engine is found dead.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._response: aiohttp.ClientResponse | None = None
        self._head_limit = asyncio.timeout(None)
        self._failure: EngineUnavailable | None = None

    async def begin(self, request: Awaitable[aiohttp.ClientResponse]) -> None:
        """Send the request and wait for the head of the answer.

        Raises:
            EngineUnavailable: no connection, or it ended, or ``fail`` was called.
        """
        try:
            async with self._head_limit:
                self._response = await request
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise self._reason(error) from error

    @property
    def status(self) -> int:
        return self._head.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._head.headers

    @property
    def is_stream(self) -> bool:
        return self._response is not None and self._response.content_type == "text/event-stream"

    async def chunks(self) -> AsyncIterator[bytes]:
        """See ``engines.base.Upstream``."""
        readany = self._head.content.readany
        patience = Patience(self._stall_timeout_s, self._stalled)
        if not self.is_stream:
            patience.stop()
        try:
            while True:
                patience.moves += 1
                chunk = await readany()
                patience.moves += 1  # what follows is the reader's time, not the engine's
                if not chunk:
                    return
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise self._reason(error) from error
        finally:
            patience.stop()

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([chunk async for chunk in self.chunks()])

    def fail(self, failure: EngineUnavailable) -> None:
        """End the request now; whoever waits for it gets ``failure``."""
        self._failure = failure
        if self._response is None:
            self._head_limit.reschedule(asyncio.get_running_loop().time())
        else:
            self._response.close()

    def close(self) -> None:
        """An answer that is not whole yet is cancelled in the engine by closing its connection."""
        if self._response is not None:
            self._response.close()

    @property
    def _head(self) -> aiohttp.ClientResponse:
        assert self._response is not None, "the head of the answer is not there yet"
        return self._response

    def _stalled(self) -> None:
        self.fail(EngineStalled(f"the engine sent nothing for {self._stall_timeout_s:g} s"))

    def _reason(self, error: Exception) -> EngineUnavailable:
        log.info("the connection to the engine broke: %s", error or type(error).__name__)
        return self._failure or EngineUnavailable("the connection to it broke")
