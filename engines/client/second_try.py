"""Sends a request to an engine, and once more if that ends before it has begun its answer.

Once only: a request that crashes its engine must not crash one after the other. The second attempt
goes to the same engine when it was started again, or to another replica (``engines.pool``). The
client sees a longer wait, not an error. If an engine has no room for a connection at the moment,
connecting is tried until it succeeds; the caller limits the time of the whole request.
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
AGAIN_S: Final = 0.1  # between two tries to connect where there is no room for a connection
# The two connections of an engine that ends are closed together, but not noticed in one order.
NOTICED_S: Final = 0.2
MAX_UNREACHED: Final = 3  # engines that take no connection, one after the other
MAX_KEPT_BYTES: Final = 1 << 20  # of a body that is held to be sent once more: 250,000 tokens
ERROR_EVENT: Final = b'data: {"error"'  # vLLM's first event, if its core died before it
END_OF_COMMENT: Final = b"\n\n"  # of a comment that was cut, perhaps
log = logging.getLogger("thermocline.engines")


class NextLife:
    """Says whether the engine that was there when this was made has ended, and awaits the next.

    It has if its control connection was lost, whether its process ended or was given up as hung.
    """

    def __init__(
        self,
        engine: Callable[[], object],
        wait_s: float,
        gave_up: Callable[[], bool],
        has_other: Callable[[], bool] | None = None,
    ) -> None:
        """Remember the present control connection.

        Args:
            engine: returns one object for as long as the control connection lasts, None without.
            wait_s: the longest wait for the next connection, in seconds.
            gave_up: returns True once no engine will be started any more.
            has_other: returns True while another engine can be asked; None = there is none, only
                the next life of this one.
        """
        self._engine = engine
        self._original = engine()
        self._wait_s = wait_s
        self._gave_up = gave_up
        self._may_ask_other = has_other is not None
        self._has_next = has_other or (lambda: engine() is not None)

    @property
    def ended(self) -> bool:
        """True once the original connection is lost."""
        return self._engine() is not self._original

    @property
    def has_other(self) -> bool:
        """True if another engine can be asked while the original one still runs."""
        return self._may_ask_other and self._has_next()

    async def ready(self) -> bool:
        """Wait until the connection is lost and there is another one; False if not in time."""
        loop = asyncio.get_running_loop()
        noticed, end = loop.time() + NOTICED_S, loop.time() + self._wait_s
        while loop.time() < end and not self._gave_up():
            if self.ended and self._has_next():
                return True
            if not self.ended and loop.time() > noticed:
                return False
            await asyncio.sleep(POLL_S)
        return False


@dataclass
class RequestBody:
    """The body of a request; a large one is let go when it has been sent."""

    content: bytes

    def sent(self) -> None:
        """Note that an engine has it, or soon will."""
        if len(self.content) > MAX_KEPT_BYTES:
            self.content = b""


@dataclass(frozen=True)
class Candidate:
    """An engine that may be asked.

    Attributes:
        name: differs from those of other engines.
        life: its account of itself, the same object for as long as it lives.
        open: sends it the body; the context ends the request.
        avoid: has others asked first for some time, since it took or kept no connection.
    """

    name: str
    life: Welcome | None
    next_life: NextLife
    open: Callable[[RequestBody], AbstractAsyncContextManager[Upstream]]
    avoid: Callable[[], None] = lambda: None


class SecondTry:
    """A request and its response; an ``engines.base.Upstream``."""

    def __init__(self, choose: Callable[[Welcome | None], Candidate]) -> None:
        """``choose``: returns an engine, but not that life of one. Raises ``EngineUnreached``."""
        self._choose = choose
        self._kept: RequestBody | None = None  # to be sent once more
        self._stack = AsyncExitStack()  # holds the request at the engine
        self._upstream: Upstream
        self._asked: Candidate | None = None

    async def begin(self, body: RequestBody) -> None:
        """Send the request and wait for the head of the response.

        Raises:
            EngineUnavailable: there is no engine, or what was asked ended, and another one, too.
        """
        self._kept = body
        try:
            await self._ask(body, None)
        except EngineUnavailable as error:
            if not await self._asked_again(self._broke(error)):
                raise
        else:
            if self.status >= 500:  # perhaps vLLM's last words
                await self._asked_again()

    async def _ask(self, body: RequestBody, but: Welcome | None) -> None:
        """Ask one that takes connections; not the one of the life ``but``."""
        unreached: dict[str, EngineUnreached] = {}
        while True:
            candidate = self._choose(but)
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
        """Say whether the connection to the engine broke, which is then avoided."""
        if isinstance(error, EngineStalled | EngineUnreached):
            return False
        if self._asked is not None:
            self._asked.avoid()
        return True

    async def _asked_again(self, broke: bool = False) -> bool:
        """Ask another engine if this one ended or its connection broke; returns whether it did."""
        body, self._kept = self._kept, None
        if body is None or not body.content or self._asked is None:
            return False
        life, next_life = self._asked.life, self._asked.next_life
        if broke and next_life.has_other:
            log.warning("a connection to a replica broke; another one is asked")
            await self._stack.aclose()
            try:
                await self._ask(body, life)
                return True
            except EngineUnreached:
                pass  # it may have ended as well: one of them will be there again
        if not await next_life.ready():
            return False
        log.warning("the engine ended with a request, which is asked once more")
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
            if not await self._promised_again(failure is not None, broke):
                if failure is not None:
                    raise failure
                return
            if has_begun:
                yield END_OF_COMMENT

    @property
    def _has_ended(self) -> bool:
        return self._asked is not None and self._asked.next_life.ended

    async def _promised_again(self, failed: bool, broke: bool) -> bool:
        """Ask once more after a head that was read; the answer must be of the kind it said."""
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
        """End the request, also in the engine."""
        await self._stack.aclose()


def is_comment(chunk: bytes) -> bool:
    """Say whether a piece of a stream is a sign of life and nothing more."""
    return chunk.startswith(b":") and all(x[:1] in (b":", b"") for x in chunk.split(b"\n"))
