"""A request that comes again while it is being served: both get the one answer.

Clients give up on a long prefill and send the same request again. Served by itself the second
would wait behind the first and be computed once more. Here it joins the turn that runs: it gets the
engine's bytes from the first one on, and if the first client leaves, the turn goes on for it.

Everything belongs to the event loop. What a turn holds for twins to come is bounded; a turn that
has said more takes none any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

from engines.base import EngineUnavailable

MAX_HELD_BYTES = 64 << 10  # of an answer that nobody has joined
MAX_SHARED_BYTES = 16 << 20  # of one that somebody reads
Key = tuple[str, str, bytes]  # tenant, session, digest of the request


class FirstLeft(Exception):
    """The request that a twin waited for has ended without an answer; the twin is on its own."""


class SharedTurn:
    """The engine's answer to one turn, as it comes, and who reads it besides its own client."""

    def __init__(self) -> None:
        self.status = 0  # 0: the engine has not begun to answer
        self.headers: Mapping[str, str] = {}
        self.pieces: list[bytes] = []
        self.over = False
        self.failure: Exception | None = None
        self._nbytes = 0
        self.num_twins = 0
        self._news = asyncio.Event()

    @property
    def can_be_joined(self) -> bool:
        return not self.over and self._nbytes <= MAX_HELD_BYTES

    def begun(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the head of the engine's answer."""
        self.status, self.headers = status, headers
        self._tell_all()

    def tell(self, piece: bytes) -> None:
        """Take the next bytes of the answer."""
        self._nbytes += len(piece)
        if self.num_twins:
            if self._nbytes > MAX_SHARED_BYTES:
                self.end(EngineUnavailable("its answer is too long to be shared"))
            if not self.over:
                self.pieces.append(piece)
            self._tell_all()
        elif self._nbytes <= MAX_HELD_BYTES:
            self.pieces.append(piece)
        else:
            self.pieces.clear()

    def end(self, failure: Exception | None = None) -> None:
        """Note that no more comes; ``failure``: and that it is not whole."""
        if not self.over:
            self.over, self.failure = True, failure
            self._tell_all()

    async def news(self) -> None:
        """Wait for anything of the above."""
        await self._news.wait()

    async def nobody_reads(self) -> None:
        """Wait until there is no twin."""
        while self.num_twins:
            await self._news.wait()

    @contextmanager
    def joined(self) -> Iterator[Twin]:
        """Be a twin for a while."""
        self.num_twins += 1
        try:
            yield Twin(self)
        finally:
            self.num_twins -= 1
            self._tell_all()

    def _tell_all(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Twin:
    """One reader of a shared turn; an ``engines.base.Upstream``."""

    def __init__(self, shared: SharedTurn) -> None:
        self._shared = shared

    async def begin(self) -> None:
        """Wait for the head.

        Raises:
            FirstLeft: there will be none.
        """
        while not self._shared.status:
            if self._shared.over:
                raise FirstLeft from self._shared.failure
            await self._shared.news()

    @property
    def status(self) -> int:
        return self._shared.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._shared.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """See ``engines.base.Upstream``."""
        shared, at = self._shared, 0
        while True:
            while at < len(shared.pieces):
                yield shared.pieces[at]
                at += 1
            if shared.over:
                break
            await shared.news()
        if shared.failure is not None:
            raise EngineUnavailable("the turn that it shared broke off") from shared.failure

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([piece async for piece in self.chunks()])


class Twins:
    """``running``: the turns that are served now and may be joined."""

    def __init__(self) -> None:
        self.running: dict[Key, SharedTurn] = {}

    def find(self, key: Key) -> SharedTurn | None:
        """Find the turn that serves the same request now; None if none does."""
        shared = self.running.get(key)
        return shared if shared is not None and shared.can_be_joined else None

    @contextmanager
    def serving(self, key: Key | None) -> Iterator[SharedTurn | None]:
        """Serve a request oneself, for others to join; ``key`` None: nobody may."""
        if key is None:
            yield None
            return
        shared = self.running[key] = SharedTurn()
        try:
            yield shared
        except BaseException:
            shared.end(EngineUnavailable("the request before it ended"))
            raise
        finally:
            shared.end()
            if self.running.get(key) is shared:
                del self.running[key]
