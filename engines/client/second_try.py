"""Sends a request to an engine, and once more if the engine ends before it begins its answer.

Only once more: a request that crashes its engine must not crash one engine after the other. The
second attempt goes to the same engine after its restart, or to another replica (``engines.pool``).
The client sees a longer wait, not an error. If an engine has no room for a connection at the
moment, connecting is retried until it succeeds; the caller limits the time of the whole request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Final

from engines.base import (
    EngineBusy,
    EngineStalled,
    EngineUnavailable,
    EngineUnreached,
    Upstream,
    Welcome,
)

POLL_S: Final = 0.05
AGAIN_S: Final = 0.1  # between two attempts to connect to engines with no room for a connection
# When an engine ends, the loss of its control connection may be noticed this much later than that
# of the request's connection.
NOTICED_S: Final = 0.2
MAX_UNREACHED: Final = 3  # engines tried in a row that take no connection
MAX_KEPT_BYTES: Final = 1 << 20  # of a body kept to be sent once more; about 250,000 tokens
ERROR_EVENT: Final = b'data: {"error"'  # vLLM's first event if its core died before the answer
END_OF_COMMENT: Final = b"\n\n"  # ends a comment that the first engine may have left unfinished
log = logging.getLogger("thermocline.engines")


@dataclass
class RequestBody:
    """The body of a request; a large one is dropped once it has been sent."""

    content: bytes

    def sent(self) -> None:
        """Drop a large body, since it has been sent to an engine."""
        if len(self.content) > MAX_KEPT_BYTES:
            self.content = b""


@dataclass(eq=False)
class Candidate:
    """An engine that a request may be sent to, in the life that it has when this is made.

    A life is the time of one control connection; it ends when that connection is lost, because the
    process ended or was found hung.

    Attributes:
        name: unique among the engines.
        account: returns the engine's ``Welcome``, the same object for as long as the control
            connection lasts; None without a connection.
        open: sends the body to the engine; leaving the context ends the request.
        wait_s: the longest wait for the next life, in seconds.
        gave_up: returns True once no engine will be started any more.
        others: returns True while another engine can be asked; None = there is no other engine,
            only the next life of this one.
        avoid: makes the pool prefer other engines for some time, since this one refused or lost a
            connection.
    """

    name: str
    account: Callable[[], Welcome | None]
    open: Callable[[RequestBody], AbstractAsyncContextManager[Upstream]]
    wait_s: float
    gave_up: Callable[[], bool]
    others: Callable[[], bool] | None = None
    avoid: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.life = self.account()

    @property
    def ended(self) -> bool:
        """True once the control connection of this life is lost."""
        return self.account() is not self.life

    async def next_is_ready(self) -> bool:
        """Wait until this life has ended and another engine or life is ready.

        Returns:
            False if this life goes on, or if none is ready within ``wait_s``.
        """
        loop = asyncio.get_running_loop()
        noticed, end = loop.time() + NOTICED_S, loop.time() + self.wait_s
        while loop.time() < end and not self.gave_up():
            if self.ended and (self.others() if self.others else self.account() is not None):
                return True
            if not self.ended and loop.time() > noticed:
                return False
            await asyncio.sleep(POLL_S)
        return False


class SecondTry:
    """A request that may be sent twice, and its response; an ``engines.base.Upstream``."""

    def __init__(self, choose: Callable[[Welcome | None], Candidate]) -> None:
        """Make a request that is not sent yet.

        Args:
            choose: returns an engine other than the life given, if any; raises ``EngineUnreached``.
        """
        self._choose = choose
        self._kept: RequestBody | None = None  # to be sent once more
        self._stack = AsyncExitStack()  # holds the request at the engine
        self._upstream: Upstream
        self._asked: Candidate | None = None

    async def begin(self, body: RequestBody) -> None:
        """Send the request and wait for the head of the response.

        Raises:
            EngineUnavailable: there is no engine, or both engines asked ended before they answered.
        """
        self._kept = body
        try:
            await self._ask(body, None)
        except EngineUnavailable as error:
            if not await self._asked_again(self._broke(error)):
                raise
        else:
            if self.status >= 500:  # vLLM may send this status as it ends
                await self._asked_again()

    async def _ask(self, body: RequestBody, excluded: Welcome | None) -> None:
        """Send the request to an engine that takes connections, except the life ``excluded``."""
        unreached: dict[str, EngineUnreached] = {}
        while True:
            candidate = self._choose(excluded)
            if candidate.name in unreached or len(unreached) == MAX_UNREACHED:
                if not any(isinstance(x, EngineBusy) for x in unreached.values()):
                    raise next(reversed(unreached.values()))
                await asyncio.sleep(AGAIN_S)
                unreached.clear()
                continue
            self._asked = candidate
            try:
                self._upstream = await self._stack.enter_async_context(candidate.open(body))
                return
            except EngineUnreached as error:
                candidate.avoid()
                unreached[candidate.name] = error
            except EngineUnavailable as error:
                self._broke(error)
                raise

    def _broke(self, error: EngineUnavailable) -> bool:
        """Return whether the error is a broken connection; if so, have the engine avoided."""
        if isinstance(error, EngineStalled | EngineUnreached):
            return False
        if self._asked is not None:
            self._asked.avoid()
        return True

    async def _asked_again(self, broke: bool = False) -> bool:
        """Send the request again if this engine ended or its connection broke.

        Returns:
            True if another engine or life has the request now.
        """
        body, self._kept = self._kept, None
        if body is None or not body.content or self._asked is None:
            return False
        asked, life = self._asked, self._asked.life
        if broke and asked.others is not None and asked.others():
            log.warning("the connection to a replica broke; the request is sent to another replica")
            await self._stack.aclose()
            try:
                await self._ask(body, life)
                return True
            except EngineUnreached:
                pass  # the other may have ended, too: wait below until one is ready again
        if not await asked.next_is_ready():
            return False
        log.warning("the engine ended before it answered a request, which is sent once more")
        await self._stack.aclose()
        await self._ask(body, life)
        return True

    @property
    def status(self) -> int:
        return self._upstream.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._upstream.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """See ``engines.base.Upstream``."""
        has_begun = False
        while True:
            failure: EngineUnavailable | None = None
            broke = False
            try:
                async for chunk in self._upstream.chunks():
                    if self._kept is not None:
                        if self._has_ended and chunk.startswith(ERROR_EVENT):
                            break
                        if not is_comment(chunk):
                            self._kept = None
                    has_begun = True
                    yield chunk
            except EngineUnavailable as error:
                failure, broke = error, self._broke(error)
            if not await self._asked_alike(failure is not None, broke):
                if failure is not None:
                    raise failure
                return
            if has_begun:
                yield END_OF_COMMENT

    @property
    def _has_ended(self) -> bool:
        return self._asked is not None and self._asked.ended

    async def _asked_alike(self, failed: bool, broke: bool) -> bool:
        """Send the request again although the caller has read a head; return whether it was sent.

        The second head must have the same status and content type.
        """
        if self._kept is None or not (failed or self._has_ended):
            return False
        kind = self.status, self.headers.get("content-type")
        asked = await self._asked_again(broke)
        if asked and kind != (self.status, self.headers.get("content-type")):
            raise EngineUnavailable(f"asked once more, it answered with status {self.status}")
        return asked

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def close(self) -> None:
        """End the request here and in the engine."""
        await self._stack.aclose()


def is_comment(chunk: bytes) -> bool:
    """Return whether a chunk of an event stream consists of comments only."""
    return chunk.startswith(b":") and all(x[:1] in (b":", b"") for x in chunk.split(b"\n"))
