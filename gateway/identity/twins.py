"""A request that comes again while it is being served: both get the one answer.

Clients give up on a long prefill and send the same request again. Served by itself the second
would wait for the first and be computed once more. Here it joins the turn that runs: it gets the
engine's bytes from the first one on, and if the first client leaves, the turn goes on for it.

The reader that wants more takes it from the engine, for all: the first client as fast as it reads,
and once there are twins a task besides, so that a client which reads slowly keeps no other one
waiting. Each reads what was taken at its own speed.

Everything belongs to the event loop. What a turn holds for twins to come is bounded; a turn that
has said more takes none any longer. What it holds for twins that read is bounded, too; in a turn
that says more they break off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

from engines.base import EngineUnavailable, Upstream

MAX_HELD_BYTES = 64 << 10  # of an answer that no twin has joined
MAX_SHARED_BYTES = 16 << 20  # of one that has readers
Key = tuple[str, str, bytes]  # tenant, session, digest of the request
First = TypeVar("First")  # what the gateway knows of the request that a turn is computed for


class FirstLeft(Exception):
    """The request that a twin waited for has ended without an answer; the twin is on its own."""


class SharedTurn(Generic[First]):
    """The engine's answer to one turn, as it comes, and who reads it besides its own client."""

    def __init__(self, first: First, put_off: Callable[[float], None]) -> None:
        """``put_off``: called with the deadlines of twins, which the turn has to keep as well."""
        self.first = first
        self.status = 0  # 0: the engine has not begun to answer
        self.headers: Mapping[str, str] = {}
        self.pieces: list[bytes] = []
        self.over = False  # no more comes
        self.failure: Exception | None = None
        self.num_twins = 0
        self._put_off = put_off
        self._nbytes = 0
        self._source: AsyncIterator[bytes] | None = None  # None: nothing can be taken from it
        self._taking = False  # a reader waits for the engine
        self._ahead: asyncio.Task[None] | None = None
        self._news: asyncio.Event | None = None  # None: no reader waits for any

    @property
    def can_be_joined(self) -> bool:
        return not self.over and self._nbytes <= MAX_HELD_BYTES

    @property
    def too_long(self) -> bool:
        """True once twins cannot have all of it."""
        return self._nbytes > MAX_SHARED_BYTES

    @property
    def needs_past(self) -> bool:
        """True while another reader may want what the first client has had."""
        if self.num_twins:
            return not self.too_long
        return self._nbytes <= MAX_HELD_BYTES

    @asynccontextmanager
    async def answered(self, upstream: Upstream) -> AsyncIterator[Upstream]:
        """Take the engine's answer for all, inside the context; yields it for the first client."""
        self.status, self.headers = upstream.status, upstream.headers
        self._source = upstream.chunks()
        self._notify_all()
        self._run_ahead()
        try:
            yield FirstReader(self)
        finally:
            self._source = None
            if self._ahead is not None:
                self._ahead.cancel()
                await asyncio.gather(self._ahead, return_exceptions=True)

    async def more(self) -> None:
        """Take the next piece from the engine, or wait until another reader has."""
        if self._taking or self._source is None:
            await self.news()
            return
        self._taking = True
        try:
            piece = await anext(self._source)
            self._nbytes += len(piece)
            self.pieces.append(piece)
        except StopAsyncIteration:
            self.end()
        except Exception as failure:  # every reader raises it
            self.end(failure)
        finally:
            self._taking = False
            self._notify_all()

    def _run_ahead(self) -> None:
        """Have a task take from the engine while twins read, if the first client lets it wait."""
        if self._source is not None and self.num_twins and (not self._ahead or self._ahead.done()):
            self._ahead = asyncio.create_task(self._take_ahead(), name="twins")

    async def _take_ahead(self) -> None:
        while self.num_twins and not self.over and not self.too_long:
            await self.more()

    def end(self, failure: Exception | None = None) -> None:
        """Note that no more comes; ``failure``: and that it is not whole."""
        if not self.over:
            self.over, self.failure = True, failure
            self._notify_all()

    async def news(self) -> None:
        """Wait for anything of the above."""
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()

    async def without_readers(self) -> None:
        """Wait until there is no twin."""
        while self.num_twins:
            await self.news()

    @contextmanager
    def joined(self, deadline: float) -> Iterator[Twin]:
        """Be a twin for a while, at most until ``deadline``."""
        self.num_twins += 1
        self._put_off(deadline)
        self._run_ahead()
        try:
            yield Twin(self)
        finally:
            self.num_twins -= 1
            self._notify_all()

    def _notify_all(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()


class Reader:
    """One reader of a shared turn; an ``engines.base.Upstream``."""

    def __init__(self, shared: SharedTurn[Any]) -> None:
        self._shared = shared
        self._at = 0  # in its pieces

    @property
    def status(self) -> int:
        return self._shared.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._shared.headers

    def chunks(self) -> AsyncIterator[bytes]:
        """See ``engines.base.Upstream``. Goes on where an earlier iteration was left."""
        raise NotImplementedError

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([piece async for piece in self.chunks()])


class FirstReader(Reader):
    """The client that the turn is computed for; it takes from the engine what it wants to read."""

    async def chunks(self) -> AsyncIterator[bytes]:
        shared = self._shared
        while True:
            while self._at < len(shared.pieces):
                self._at += 1
                yield shared.pieces[self._at - 1]
            if shared.over:
                break
            if not shared.needs_past:
                shared.pieces.clear()
                self._at = 0
            await shared.more()
        if shared.failure is not None:
            raise shared.failure


class Twin(Reader):
    """A client that has joined; it reads what was taken."""

    async def begin(self) -> None:
        """Wait for the head.

        Raises:
            FirstLeft: there will be none.
        """
        while not self._shared.status:
            if self._shared.over:
                raise FirstLeft from self._shared.failure
            await self._shared.news()

    async def chunks(self) -> AsyncIterator[bytes]:
        shared = self._shared
        while not shared.too_long:
            if self._at < len(shared.pieces):
                self._at += 1
                yield shared.pieces[self._at - 1]
            elif shared.over:
                break
            else:
                await shared.news()
        if shared.too_long:
            raise EngineUnavailable("its answer is too long to be shared")
        if shared.failure is not None:
            raise EngineUnavailable("the turn that it shared broke off") from shared.failure


class Twins(Generic[First]):
    """``running``: the turns that are served now; the latest of those for the same request."""

    def __init__(self) -> None:
        self.running: dict[Key, SharedTurn[First]] = {}

    def find(self, key: Key) -> SharedTurn[First] | None:
        """Find the turn that serves the same request now; None if none does."""
        shared = self.running.get(key)
        return shared if shared is not None and shared.can_be_joined else None

    @contextmanager
    def serving(
        self, key: Key, first: First, put_off: Callable[[float], None]
    ) -> Iterator[SharedTurn[First]]:
        """Serve a request oneself, for others to join; see ``SharedTurn``."""
        shared = self.running[key] = SharedTurn(first, put_off)
        try:
            yield shared
        finally:
            shared.end(EngineUnavailable("the request before it ended"))
            if self.running.get(key) is shared:
                del self.running[key]
