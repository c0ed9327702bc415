"""One HTTP request to an engine, from its first byte to the last one of the response.

A wait for bytes is limited, and an engine that ended meanwhile may be awaited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from engines.base import EngineStalled, EngineUnavailable, EngineUnreached
from engines.client.connection import HttpAddress, HttpResponse

LOOKS_PER_LIMIT = 4
POLL_S = 0.05
# The two connections of an engine that ends are closed together, but not heard of in one order.
NOTICED_S = 0.2
log = logging.getLogger("thermocline.engines")
ERROR_EVENT = b'data: {"error"'  # vLLM's first event, if its core died before it
END_OF_COMMENT = b"\n\n"  # of a comment that was cut, perhaps
MAX_KEPT_BYTES = 1 << 20  # of a body that is held to be sent once more; some 250,000 tokens of text


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


class NextLife:
    """Says whether the engine that was there when this was made has ended, and awaits the next.

    It has if its control connection was lost, whether its process ended or was given up as hung.
    """

    def __init__(
        self,
        engine: Callable[[], object],
        wait_s: float,
        no_hope: Callable[[], bool],
        there: Callable[[], bool] | None = None,
    ) -> None:
        """Remember the engine of now.

        Args:
            engine: returns one object for as long as the control connection lasts, None without.
            wait_s: the longest wait for the next one, in seconds.
            no_hope: says that none will come.
            there: says that another one can be asked; None = only the next life of this one.
        """
        self._engine = engine
        self._then = engine()
        self._wait_s = wait_s
        self._no_hope = no_hope
        self._beside = there is not None
        self._there = there or (lambda: engine() is not None)

    @property
    def ended(self) -> bool:
        """True once the engine of then has ended."""
        return self._engine() is not self._then

    @property
    def another_is_there(self) -> bool:
        """True if one can be asked beside the engine of then."""
        return self._beside and self._there()

    async def ready(self) -> bool:
        """Wait until the engine has ended and one is there again; False if not in time."""
        loop = asyncio.get_running_loop()
        noticed, end = loop.time() + NOTICED_S, loop.time() + self._wait_s
        while loop.time() < end and not self._no_hope():
            if self.ended and self._there():
                return True
            if not self.ended and loop.time() > noticed:
                return False
            await asyncio.sleep(POLL_S)
        return False


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
