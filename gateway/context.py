"""The parts that every request handler works with, and how a handler gets at them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from starlette.requests import Request

from engines.base import Engine, EngineError, EngineUnavailable, SessionRef
from engines.openai.images import Sight
from engines.openai.requests import InvalidRequest
from engines.wire import Welcome
from gateway.access.key_list import KeyList
from gateway.access.log_ring import LogRing
from gateway.config import LOOPBACK, GatewayConfig
from gateway.edge.body_budget import BodyBudget, body_share_of
from gateway.errors import Failure, Refused
from gateway.identity.known_chats import KnownChats
from gateway.keys import Tenant, Tenants
from gateway.limits.accounts import account_of
from gateway.limits.key_limits import KeyLimits
from gateway.live.live import Live
from gateway.live.places import StreamPlaces
from gateway.live.requests import LiveRequest
from gateway.metrics import Gauges, Metrics
from gateway.prefixes.prefix_watch import PrefixWatch
from gateway.prefixes.twins import Twins
from gateway.stored.seal import SealedText
from gateway.stored.stored import Stored
from gateway.telemetry.tracing import PassOn, Tracing
from scheduler.sessions import SessionManager

ENGINE_POLL_S = 0.05
FIGURES_S = 0.5  # an engine that does not answer must not make /metrics wait
LAST_WORDS_S = 1.0  # to tell all streams that they end
_CALLER = "caller"  # where a request's tenant is in the scope's state
MAX_AWAITING = 256  # requests beyond these get 503 at once; each holds a connection


@dataclass
class Gateway:
    """The parts of one app, at ``app.state.gateway``. Only the last three fields ever change."""

    config: GatewayConfig
    engine: Engine
    sessions: SessionManager
    tenants: Tenants
    metrics: Metrics
    chats: KnownChats
    bodies: BodyBudget
    limits: KeyLimits
    live: Live
    event_places: StreamPlaces
    keys: KeyList
    stored: Stored = field(default_factory=Stored)
    prefixes: PrefixWatch = field(default_factory=PrefixWatch)
    twins: Twins[LiveRequest] = field(default_factory=Twins)
    tracing: Tracing = field(default_factory=PassOn)
    log_ring: LogRing = field(default_factory=LogRing)
    started_at: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    has_served: bool = False  # the engine was ready for some request
    num_awaiting: int = 0  # requests that wait for the engine to come back

    @property
    def served(self) -> Welcome:
        """The engine's account of itself. Raises ``EngineUnavailable`` while it is not ready."""
        welcome = self.engine.welcome
        if welcome is None:
            raise EngineUnavailable(self.engine.trouble)
        return welcome

    @property
    def sight(self) -> Sight:
        """The images that the engine takes. Raises ``EngineUnavailable`` as ``served`` does."""
        return Sight(self.served.sees_images, self.config.remote_images)

    async def served_soon(self) -> Welcome:
        """Return ``served``; an engine that died first gets ``engine_wait_s`` to come back.

        An engine that has never been ready is still reading its weights: a request that comes too
        early is told so at once.

        Raises:
            EngineUnavailable: the engine is not ready, or not again in time.
        """
        if self.has_served and self.num_awaiting < MAX_AWAITING:
            self.num_awaiting += 1
            try:
                await self._wait_for_engine()
            finally:
                self.num_awaiting -= 1
        served = self.served
        self.has_served = True
        return served

    async def _wait_for_engine(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.engine_wait_s
        while not self.engine.ready and not self.draining and loop.time() < until:
            await asyncio.sleep(ENGINE_POLL_S)

    def knows(self, tenant: Tenant, session_id: str) -> bool:
        """Tell whether the tenant has a session of that id."""
        return self.sessions.get(self.session(tenant, session_id)) is not None

    def is_quiet(self, tenant: Tenant, session_id: str) -> bool:
        """Tell whether the tenant has a session of that id, and nothing of it is being served."""
        seen = self.sessions.get(self.session(tenant, session_id))
        return seen is not None and seen.state not in ("active", "waking")

    def has_room_for(self, tenant: Tenant, session_id: str) -> bool:
        """Tell whether the tenant has that session, or may open one more.

        Sessions that running requests will open count as if they were there.
        """
        most, coming = self.limits.of(tenant).sessions, self.limits.coming(tenant)
        if not most or session_id in coming or self.knows(tenant, session_id):
            return True
        num_new = sum(not self.knows(tenant, x) for x in coming)
        return self.sessions.num_sessions(tenant.name) + num_new < most

    def check_new_session(self, tenant: Tenant, session_id: str) -> None:
        """Raise ``Refused`` (429) if the tenant has all the sessions it may, and not this one."""
        if not self.has_room_for(tenant, session_id):
            most = self.limits.of(tenant).sessions
            message = f"This key may have {most} sessions at once. Delete some: /v1/sessions."
            raise Refused(Failure(429, message, "session_id", "session_limit"))

    def session(self, tenant: Tenant, session_id: str) -> SessionRef:
        """Name a session of the tenant, known or new."""
        return SessionRef(tenant=tenant.name, id=session_id, salt=tenant.salt)

    def sealed_texts(self, tenant: Tenant) -> SealedText:
        """Return what seals texts for the tenant to keep, and opens them again."""
        return SealedText(self.tenants.key_of(tenant.name, b"compaction"))

    async def gauges(self) -> Gauges:
        """Gather the figures of this moment; without the engine's if it does not answer."""
        try:
            async with asyncio.timeout(FIGURES_S):
                report = await self.engine.stats() if self.engine.ready else None
        except (EngineError, TimeoutError):
            report = None
        return Gauges(
            ready=self.engine.ready,
            num_running=self.sessions.num_running,
            num_waiting=self.sessions.num_waiting,
            engine=report,
            memory_available_bytes=self.sessions.headroom.available_bytes,
            sessions=Counter((x.state.value, x.tier or "") for x in self.sessions.table),
        )

    async def cut(self) -> None:
        """End the running turns now; a stream ends with an error event."""
        ending = asyncio.create_task(self.engine.stop(0), name="engine-cut")
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_WORDS_S
        while self.sessions.num_running and loop.time() < until:
            await asyncio.sleep(ENGINE_POLL_S)
        ending.cancel()  # the engine saves and leaves by itself when this process is gone

    async def drain(self) -> None:
        """Take no new turns, and let the running ones finish within ``drain_s``.

        Streams that are cut off then end with an error event, as they do when an engine dies.
        """
        self.draining = True
        self.live.end()
        self.sessions.stop_admitting()
        await self.engine.stop(self.config.drain_s)


def gateway_of(request: Request) -> Gateway:
    """Return the parts of the app that serves ``request``."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def sees_all(request: Request, caller: Tenant) -> bool:
    """Tell whether the caller is an admin: by its key, or as the one user of this very machine.

    Where admins have a port of their own (``gateway.admin_port``), nobody is one elsewhere, but on
    their unix socket.

    An open server on loopback has one user, who owns its process anyway. Pages of other sites are
    kept out by the checks of ``Host`` and ``Origin``, as they are from that user's chats. Once an
    admin key is set, it is needed here, too.
    """
    gateway = gateway_of(request)
    if gateway.config.is_admin_socket(request.scope.get("server")):
        return True
    if gateway.config.admin_port and _port_of(request) != gateway.config.admin_port:
        return False
    if caller.admin:
        return True
    tenants = gateway.tenants
    config = gateway.config
    local = config.admin_host in LOOPBACK if config.admin_port else config.on_loopback
    return tenants.open_to_all and not tenants.num_admin_keys and local


def _port_of(request: Request) -> int:
    server = request.scope.get("server")
    return int(server[1] or 0) if server else 0


def admin_of(request: Request) -> Tenant:
    """Authenticate a request that only an admin may make.

    Raises:
        InvalidRequest: 401, no key or an unknown one; 403, not an admin's.
    """
    caller = caller_of(request)
    if sees_all(request, caller):
        return caller
    port = gateway_of(request).config.admin_port
    where = f" on port {port}" if port else ""
    message = f"This needs an admin key{where}; see gateway.admin_keys."
    raise InvalidRequest(message, None, "admin_only", 403)


def caller_of(request: Request) -> Tenant:
    """Authenticate a request by its API key, and charge its route's account to that key, once.

    On the admins' unix socket no key is looked at. From here on the body counts as this tenant's.

    Raises:
        InvalidRequest: 401, no key, an unknown one, or two that differ.
        Refused: 429, the key has used up what it may.
    """
    state = request.scope["state"]
    if (known := state.get(_CALLER)) is not None:
        assert isinstance(known, Tenant)
        return known
    gateway, headers = gateway_of(request), request.headers
    if gateway.config.is_admin_socket(request.scope.get("server")):
        caller = gateway.tenants.operator()
    else:
        key, other = headers.get("authorization"), headers.get("x-api-key")
        caller = gateway.tenants.authenticate(key, other)
    gateway.limits.enter(caller, request.scope, account_of(request.scope))
    body_share_of(request.scope).tenant = caller.name
    state[_CALLER] = caller
    return caller
