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

SAVE_S: Final = 30.0  # time that an engine gets to save its memory when the server stops


class EngineError(Exception):
    """EngineError
    +-- EngineUnavailable   not running, still starting, or the connection broke
    |   +-- EngineStalled   connected, but silent for too long
    |   +-- EngineUnreached took no connection, so it has received nothing of the request
    |       +-- EngineBusy  runs, but has no room for one more connection at the moment
    +-- EngineRefused       understood the request and refused it
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
    """A queue is full, or a request waited in it for too long; try again after ``retry_after_s``.

    ``retry_after_s`` is in seconds.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Demoted(msgspec.Struct, frozen=True):
    """The outcome of a demote.

    ``report`` is None if the engine does not know the session. ``kept`` is the reason why the
    session is still hot; None if it is not.
    """

    report: SessionReport | None
    kept: KeptReason | None


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one of several engines of a model."""

    name: str
    ready: bool
    trouble: str  # the reason why it is not ready; "" while it is
    num_running: int  # requests of this gateway


@runtime_checkable
class HasReplicas(Protocol):
    """An engine made of several replicas, each an ``Engine`` itself: see ``engines.pool``."""

    @property
    def replicas(self) -> Sequence[ReplicaState]: ...

    @property
    def members(self) -> Mapping[str, Engine]:
        """The replicas that take requests now, by name."""


@runtime_checkable
class LimitsTenants(Protocol):
    """An engine that limits the bytes of a tenant per tier: every engine but a pool of replicas."""

    @property
    def welcome(self) -> Welcome | None: ...

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        """See ``engines.wire.LimitTenants``. Raises as ``Engine.demote`` does."""


class Upstream(Protocol):
    """The engine's answer to one data-plane request: head first, body as it comes."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The response headers; names are case-insensitive."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body's bytes as they arrive; chunk boundaries have no meaning.

        Raises:
            EngineUnavailable: the connection broke before the body was whole.
            EngineStalled: nothing came for too long.
        """

    async def read(self) -> bytes:
        """Return the whole body. Raises as ``chunks`` does."""


@runtime_checkable
class Engine(Protocol):
    """An engine as the gateway and the scheduler see it.

    The data plane is ``open``; the control plane is the verbs from ``demote`` to ``measure``.
    """

    @property
    def welcome(self) -> Welcome | None:
        """The engine's account of itself; None while it is not ready.

        It is the same object for as long as the connection lasts.
        """

    @property
    def codec(self) -> CodecReport | None:
        """The codec as last reported; it may change at any time, unlike the rest of the welcome.

        None while the engine is not ready.
        """

    @property
    def ready(self) -> bool: ...

    @property
    def trouble(self) -> str:
        """The reason why the engine is not ready, in one sentence; "" while it is."""

    @property
    def gave_up(self) -> bool:
        """True once the engine is known to be unable to serve with its settings; the log says why.

        It is then not started again.
        """

    async def start(self) -> None:
        """Start or attach to the engine; returns at once, and ``ready`` turns true later.

        It may be called again after ``stop``, which is how a model is loaded again.
        """

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        """Stop the engine; safe to call twice.

        Args:
            drain_s: time for running requests to finish, in seconds.
            save_s: time after that to save what is only in the engine's memory, in seconds.
        """

    def restart(self, why: str) -> None:
        """End the engine's process at once; the supervisor then starts another.

        In a pool, the replica that holds most is ended. An engine that was started elsewhere is
        left alone.

        Args:
            why: the reason, for the log.
        """

    def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Upstream]:
        """POST ``body`` to the engine. Leaving the context early cancels the request there.

        Args:
            wait_s: if the engine ends before it has answered anything, how long to wait for it to
                come back, in seconds; the request is then sent once more. None: the request is
                sent only once, and fails if the engine has no room for a connection.

        Raises (on entering):
            EngineUnavailable: no engine can be reached.
        """

    def session_headers(self, session: SessionRef) -> dict[str, str]:
        """Return the headers that name a turn's session to the engine; see ``engines.http``."""

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        """Return the client's body with the private fields that this engine needs set in it."""

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        """See ``engines.wire.Demote``.

        Raises, as all verbs do:
            EngineUnavailable: there is no connection, or no answer in time.
            EngineRefused: the engine refused.
        """

    async def prefetch(self, session: SessionRef) -> SessionReport | None: ...

    async def pin(self, session: SessionRef, pinned: bool) -> SessionReport | None: ...

    async def forget(self, session: SessionRef) -> SessionReport | None: ...

    async def sessions(self) -> list[SessionReport]: ...

    async def stats(self) -> EngineReport: ...

    async def adopt(self) -> CodecReport:
        """Make the engine choose its codec again from its measurements; see ``wire.Adopt``."""

    async def measure(self, order: CalibrationOrder | None = None) -> CodecReport:
        """Make the engine measure codecs on its model; only if ``Welcome.can_measure``."""

    def notices(self) -> AsyncIterator[Notice | None]:
        """Yield changes of sessions as they happen, for one reader.

        None means that changes may be missing, as after a reconnection: call ``sessions`` again.
        """
