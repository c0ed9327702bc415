"""The seam between the scheduler, the gateway and an engine, whatever it is.

An engine is another process. The gateway starts it, or attaches to it by URL, and knows it by this
protocol only. ``engines.fake`` is one that ships with the product.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import msgspec

from engines.wire import CodecReport as CodecReport
from engines.wire import EngineReport as EngineReport
from engines.wire import Notice as Notice
from engines.wire import SessionReport as SessionReport
from engines.wire import Welcome as Welcome
from kvstore.records import SessionRef as SessionRef
from kvstore.records import TierName as TierName


class EngineError(Exception):
    """EngineError
    +-- EngineUnavailable   not running, still starting, or the connection broke
    |   +-- EngineStalled   there, but silent for too long
    +-- EngineRefused       it understood and said no
    """


class EngineUnavailable(EngineError):
    pass


class EngineStalled(EngineUnavailable):
    pass


class EngineRefused(EngineError):
    def __init__(self, message: str, code: str = "") -> None:
        """``code`` is that of ``engines.wire.Refused``."""
        super().__init__(message)
        self.code = code


class Demoted(msgspec.Struct, frozen=True):
    """``report`` is None for a session the engine does not know; ``kept`` = why it is still hot."""

    report: SessionReport | None
    kept: str


class Upstream(Protocol):
    """The engine's answer to one data-plane request: head first, body as it comes."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Case-insensitive."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive from the socket, boundaries meaningless.

        Raises:
            EngineUnavailable: the connection broke before the body was whole.
            EngineStalled: nothing came for too long.
        """

    async def read(self) -> bytes:
        """The whole body. Raises as ``chunks`` does."""


@runtime_checkable
class Engine(Protocol):
    """Control plane in eight verbs, data plane in one."""

    @property
    def welcome(self) -> Welcome | None:
        """What the engine said of itself; None while it is not ready. One object for as long as the
        connection lasts."""

    @property
    def codec(self) -> CodecReport | None:
        """As last heard: unlike the rest of the welcome it changes while the engine runs."""

    @property
    def ready(self) -> bool: ...

    @property
    def trouble(self) -> str:
        """Why it is not ready, in one sentence; "" while it is."""

    @property
    def gave_up(self) -> bool:
        """It cannot serve with its settings and never will; its log says why."""

    async def start(self) -> None:
        """Start or attach; returns at once, ``ready`` turns true later."""

    async def stop(self, drain_s: float) -> None:
        """End it; running requests get ``drain_s`` seconds. Safe to call twice."""

    def restart(self, why: str) -> None:
        """End its process at once; what keeps engines running starts another.

        Nothing happens to an engine that was started elsewhere.
        """

    def open(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Upstream]:
        """POST ``body`` to the engine. Leaving the context early cancels the request there.

        Raises (on entering):
            EngineUnavailable: no engine to talk to.
        """

    def session_headers(self, session: SessionRef) -> dict[str, str]:
        """How this engine is told whose turn it is."""

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        """The client's body with engine-private fields set by us (vLLM), or as it is (mlx)."""

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted: ...

    async def prefetch(self, session: SessionRef) -> SessionReport | None: ...

    async def pin(self, session: SessionRef, pinned: bool) -> SessionReport | None: ...

    async def forget(self, session: SessionRef) -> SessionReport | None: ...

    async def sessions(self) -> list[SessionReport]: ...

    async def stats(self) -> EngineReport: ...

    async def adopt(self) -> CodecReport:
        """Have it look again at what was measured on its model; see ``engines.wire.Adopt``."""

    def notices(self) -> AsyncIterator[Notice | None]:
        """Changes as they happen; None = the engine (re)connected, ask ``sessions`` again."""
