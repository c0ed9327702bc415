"""One HTTP request to a fleet: to one replica, and once more to another if that one ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final

from engines.base import EngineStalled, EngineUnavailable, EngineUnreached, Upstream
from engines.client.http_exchange import (
    END_OF_COMMENT,
    ERROR_EVENT,
    MAX_KEPT_BYTES,
    NextLife,
    is_comment,
)
from engines.fleet.replica import Replica
from engines.wire import Welcome

log = logging.getLogger("thermocline.engines")

MAX_UNREACHED: Final = 3  # replicas that take no connection, one after the other


class FleetExchange:
    """A request and its response; an ``engines.base.Upstream``.

    If a replica ends, or its connection breaks, before it has said anything of its answer, another
    one is asked, once, as ``HttpExchange`` asks the next life of a single engine. A process that
    was killed may leave a socket that others hold open for some seconds, so a replica whose
    connection broke is avoided for some time.
    """

    def __init__(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        choose: Callable[[Welcome | None], Replica],
        served: Callable[[Replica], None],
        next_life: Callable[[Replica], NextLife],
    ) -> None:
        """
        Args:
            choose: returns a replica, but not that life of one.
            served: called with the replica that has taken the request.
            next_life: makes what waits for a replica to take the place of one that ends.
        """
        self._path = path
        self._headers = headers
        self._choose = choose
        self._served = served
        self._next_life = next_life
        self._kept: bytes | None = None  # the body, to be sent once more
        self._stack = AsyncExitStack()  # holds the request at the replica
        self._upstream: Upstream
        self._asked: tuple[Replica, Welcome | None, NextLife] | None = None  # and its life

    async def begin(self, body: bytes) -> None:
        """Send the request and wait for the head of the response.

        Raises:
            EngineUnavailable: there is no replica, or what was asked ended, and another one, too.
        """
        self._kept = body if len(body) <= MAX_KEPT_BYTES else None
        try:
            await self._ask(body, None)
        except EngineUnavailable as error:
            if not await self._asked_again(self._broke(error)):
                raise
        else:
            if self.status >= 500:  # perhaps vLLM's last words
                await self._asked_again()

    async def _ask(self, body: bytes, but: Welcome | None) -> None:
        """Ask a replica that takes connections; not the one of the life ``but``."""
        unreached: dict[Replica, EngineUnreached] = {}
        while len(unreached) < MAX_UNREACHED:
            replica = self._choose(but)
            if replica in unreached:
                break  # there is no other
            self._asked = replica, replica.engine.welcome, self._next_life(replica)
            try:
                await self._enter(replica, body)
                return
            except EngineUnreached as error:
                replica.avoid()
                unreached[replica] = error
            except EngineUnavailable as error:
                self._broke(error)
                raise
        raise next(reversed(unreached.values()))

    async def _enter(self, replica: Replica, body: bytes) -> None:
        replica.num_running += 1
        self._stack.callback(replica.left)
        try:
            opening = replica.engine.open(self._path, body, self._headers)
            self._upstream = await self._stack.enter_async_context(opening)
        except BaseException:
            await self._stack.aclose()
            raise
        if self._upstream.status < 400:
            self._served(replica)

    def _broke(self, error: EngineUnavailable) -> bool:
        """Say whether the connection to the replica broke, which is then avoided."""
        if isinstance(error, EngineStalled | EngineUnreached):
            return False
        if self._asked is not None:
            self._asked[0].avoid()
        return True

    async def _asked_again(self, broke: bool = False) -> bool:
        """Ask another replica if this one ended or its connection broke; returns whether it did."""
        body, self._kept = self._kept, None
        if body is None or self._asked is None:
            return False
        _, life, next_life = self._asked
        if broke and next_life.another_is_there:
            log.warning("a connection to a replica broke; another one is asked")
            await self._stack.aclose()
            try:
                await self._ask(body, life)
                return True
            except EngineUnreached:
                pass  # it may have ended as well: one of them will be there again
        if not await next_life.ready():
            return False
        log.warning("a replica ended with a request; another one is asked")
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
        return self._asked is not None and self._asked[2].ended

    async def _promised_again(self, failed: bool, broke: bool) -> bool:
        """Ask another replica after a head that was read; its answer must be of the same kind."""
        if self._kept is None or not (failed or self._has_ended):
            return False
        kind = self.status, self.headers.get("content-type")
        asked = await self._asked_again(broke)
        if asked and kind != (self.status, self.headers.get("content-type")):
            raise EngineUnavailable(f"another replica answered with status {self.status}")
        return asked

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def close(self) -> None:
        """End the request, also in the replica."""
        await self._stack.aclose()
