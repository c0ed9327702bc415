"""One HTTP request to an engine, from its first byte to the last one of the response.

A wait for bytes is limited. ``engines.client.second_try`` asks once more where that is right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from engines.base import EngineBusy, EngineStalled, EngineUnavailable, EngineUnreached
from engines.client.connection import HttpAddress, HttpResponse

LOOKS_PER_LIMIT = 4
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


class HttpExchange:
    """A request and its response; an ``engines.base.Upstream``.

    A stream must show a sign of life every ``stall_timeout_s`` seconds. A response that comes whole
    has no such limit: ``EngineClient`` ends it with ``fail`` when the engine is found dead.
    """

    def __init__(self, address: HttpAddress, stall_timeout_s: float) -> None:
        self._address = address
        self._stall_timeout_s = stall_timeout_s
        self._response = HttpResponse()

    async def send(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send the request; ``head`` waits for the answer, for which a large body is not needed.

        Raises:
            EngineUnreached: no connection.
            ValueError: a header has more than one line.
        """
        head = self._address.request_head("POST", path, headers, len(body))
        try:
            transport = await self._address.connect(self._response)
        except OSError as error:  # TimeoutError is one
            log.info("no connection to the engine: %s", error or type(error).__name__)
            kind = EngineBusy if isinstance(error, TimeoutError) else EngineUnreached
            raise kind("it takes no connections") from error
        transport.write(head)
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
        watchdog = StallWatchdog(self._stall_timeout_s, self._stalled)
        if not self.is_stream:
            watchdog.stop()
        try:
            while True:
                watchdog.edges += 1
                chunk = await self._response.next_chunk()
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
        """End the exchange now; its caller gets ``failure``."""
        self._response.fail(failure)

    def close(self) -> None:
        """Close the connection, which cancels the request in the engine if it still runs."""
        self._response.close()

    def _stalled(self) -> None:
        self.fail(EngineStalled(f"the engine sent nothing for {self._stall_timeout_s:g} s"))
