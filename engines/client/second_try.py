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


@dataclass
class RequestBody:
    """The body of a request; a large one is let go when it has been sent."""

    content: bytes

    def sent(self) -> None:
        """Note that an engine has it, or soon will."""
        if len(self.content) > MAX_KEPT_BYTES:
            self.content = b""


@dataclass(eq=False)
class Candidate:
    """An engine that may be asked, in the life that it has when this is made.

    That has ended once its control connection is lost, whether its process ended or was given up as
    hung.

    Attributes:
        name: differs from those of other engines.
        account: returns its account of itself, the same object for as long as the control
            connection lasts, None without.
        open: sends it the body; the context ends the request.
        wait_s: the longest wait for the next connection, in seconds.
        gave_up: returns True once no engine will be started any more.
        others: returns True while another engine can be asked; None = there is none, only the next
            life of this one.
        avoid: has others asked first for some time, since it took or kept no connection.
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
        """Wait until it has ended and there is another one; False if not in time."""
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
        asked, life = self._asked, self._asked.life
        if broke and asked.others is not None and asked.others():
            log.warning("a connection to a replica broke; another one is asked")
            await self._stack.aclose()
            try:
                await self._ask(body, life)
                return True
            except EngineUnreached:
                pass  # it may have ended as well: one of them will be there again
        if not await asked.next_is_ready():
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
        return self._asked is not None and self._asked.ended

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
