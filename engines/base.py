"""The protocol by which the gateway and the scheduler use an engine of any kind.

An engine is another process. The gateway starts it, or attaches to it by URL, and knows it by this
protocol only. ``engines.client`` implements it for every engine that ships with the product.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, runtime_checkable

import msgspec

from engines.config import CalibrationOrder
from engines.http import CacheOutcome as CacheOutcome
from engines.wire import CodecReport as CodecReport
from engines.wire import EngineReport as EngineReport
from engines.wire import KeptReason as KeptReason
from engines.wire import Notice as Notice
from engines.wire import SessionReport as SessionReport
from engines.wire import TenantUses as TenantUses
from engines.wire import Welcome as Welcome
from kvstore.session import TIERS as TIERS
from kvstore.session import KVSize as KVSize
from kvstore.session import SessionRef as SessionRef
from kvstore.session import TenantLimits as TenantLimits
from kvstore.session import TierName as TierName

SAVE_S: Final = 30.0  # at the end of a server


class EngineError(Exception):
    """EngineError
    +-- EngineUnavailable   not running, still starting, or the connection broke
    |   +-- EngineStalled   there, but silent for too long
    |   +-- EngineUnreached it has nothing of the request: it took no connection
    |       +-- EngineBusy  there, but with no room for one more connection at the moment
    +-- EngineRefused       it understood and said no
    """


class EngineUnavailable(EngineError):
    """The engine does not run, is still starting, or the connection to it broke."""


class EngineStalled(EngineUnavailable):
    """The engine is connected, but sent nothing for too long."""


class EngineUnreached(EngineUnavailable):
    """The request did not reach the engine, which was not ready or refused the connection."""


class EngineBusy(EngineUnreached):
    """The engine has no room for one more connection at the moment."""


class EngineRefused(EngineError):
    """The engine understood the request and refused it."""


class Overloaded(Exception):
    """Too much waits already, or waited too long. Try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Demoted(msgspec.Struct, frozen=True):
    """The outcome of a demote.

    ``report`` is None for a session that the engine does not know; ``kept`` is None if it is not
    hot any more.
    """

    report: SessionReport | None
    kept: KeptReason | None


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one of several engines of a model."""

    name: str
    ready: bool
    trouble: str  # why it is not; "" while it is
    num_running: int  # requests of this gateway


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that is several, each of which can be asked by itself: see ``engines.pool``."""

    @property
    def replicas(self) -> Sequence[ReplicaState]: ...

    @property
    def members(self) -> Mapping[str, Engine]:
        """The replicas that take requests now, by name."""


@runtime_checkable
class LimitsTenants(Protocol):
    """An engine that holds tenants to bytes of the tiers: any but one that is several."""

    @property
    def welcome(self) -> Welcome | None: ...

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        """See ``engines.wire.LimitTenants``. Raises as verbs do."""


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
        """The engine's account of itself; None while it is not ready.

        It is the same object for as long as the connection lasts.
        """

    @property
    def codec(self) -> CodecReport | None:
        """The codec as last reported; unlike the rest of the welcome it may change at any time."""

    @property
    def ready(self) -> bool: ...

    @property
    def trouble(self) -> str:
        """The reason why it is not ready, in one sentence; "" while it is."""

    @property
    def gave_up(self) -> bool:
        """True once it is known that it cannot serve as things are; the log says why."""

    async def start(self) -> None:
        """Start or attach; returns at once, ``ready`` turns true later.

        After ``stop`` it may be called again: a model is loaded again so.
        """

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        """End it; running requests get ``drain_s`` seconds. Safe to call twice.

        Args:
            save_s: how long it may then write what only its memory holds, in seconds.
        """

    def restart(self, why: str) -> None:
        """End its process at once; another is started by itself.

        Of several replicas the one that holds most is ended. Does nothing to an engine that was
        started elsewhere.
        """

    def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Upstream]:
        """POST ``body`` to the engine. Leaving the context early cancels the request there.

        Args:
            wait_s: for how long an engine that ends before it has said anything is waited for; once
                it is there again it is asked once more. None: it is asked once, and not tried
                again where it has no room for a connection.

        Raises (on entering):
            EngineUnavailable: no engine to talk to.
        """

    def session_headers(self, session: SessionRef) -> dict[str, str]:
        """Headers that name the session of a turn to the engine; see ``engines.http``."""

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        """Return the client's body, with private fields of the engine set by us if it has any."""

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        """See ``engines.wire.Demote``.

        Raises, as all verbs do:
            EngineUnavailable: no connection, or no answer in time.
            EngineRefused: the engine said no.
        """

    async def prefetch(self, session: SessionRef) -> SessionReport | None: ...

    async def pin(self, session: SessionRef, pinned: bool) -> SessionReport | None: ...

    async def forget(self, session: SessionRef) -> SessionReport | None: ...

    async def sessions(self) -> list[SessionReport]: ...

    async def stats(self) -> EngineReport: ...

    async def adopt(self) -> CodecReport:
        """Have it choose its codec again from the measurements; see ``engines.wire.Adopt``."""

    async def measure(self, order: CalibrationOrder | None = None) -> CodecReport:
        """Have it measure codecs on its model; only if ``Welcome.can_measure``."""

    def notices(self) -> AsyncIterator[Notice | None]:
        """Yield changes as they happen; None = ask ``sessions`` again, as after a reconnection."""
