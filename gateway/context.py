"""All that a request's handler works with, in one place."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from engines.base import Engine, EngineError, EngineUnavailable, SessionRef
from engines.wire import Welcome
from gateway.config import GatewayConfig
from gateway.identity import KnownChats
from gateway.keys import Tenant, Tenants
from gateway.metrics import Gauges, Metrics
from scheduler.sessions import SessionManager


@dataclass
class Gateway:
    """One per app, at ``app.state.gateway``. ``draining`` is the only thing that changes."""

    config: GatewayConfig
    engine: Engine
    sessions: SessionManager
    tenants: Tenants
    metrics: Metrics
    chats: KnownChats
    started_at: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def served(self) -> Welcome:
        """What the engine said of itself. Raises ``EngineUnavailable`` while there is none."""
        welcome = self.engine.welcome
        if welcome is None:
            raise EngineUnavailable(self.engine.trouble)
        return welcome

    def knows(self, tenant: Tenant, session_id: str) -> bool:
        return self.sessions.get(self.session(tenant, session_id)) is not None

    def session(self, tenant: Tenant, session_id: str) -> SessionRef:
        return SessionRef(tenant=tenant.name, id=session_id, salt=tenant.salt)

    async def gauges(self) -> Gauges:
        try:
            report = await self.engine.stats() if self.engine.ready else None
        except EngineError:
            report = None
        return Gauges(
            ready=self.engine.ready,
            num_running=self.sessions.num_running,
            num_waiting=self.sessions.num_waiting,
            engine=report,
            memory_available_bytes=self.sessions.headroom.available_bytes,
        )

    async def drain(self) -> None:
        """Take no new turns; let the running ones finish, but no longer than ``drain_s``.

        Streams that are cut off end with an error event, as they do when an engine dies.
        """
        self.draining = True
        self.sessions.stop_admitting()
        await self.engine.stop(self.config.drain_s)


def gateway_of(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def caller_of(request: Request) -> Tenant:
    """Whose request this is. Raises ``InvalidRequest`` (401)."""
    return gateway_of(request).tenants.authenticate(request.headers.get("authorization"))
