"""The parts that every request handler works with, and how a handler reaches them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, request_response
from starlette.types import Scope

from engines.http import while_client_stays
from engines.openai.requests import InvalidRequest
from engines.pool.hub_cache import HubCache
from engines.pool.loading import Loading
from engines.pool.on_demand import OnDemand
from engines.wire import Welcome
from gateway.config import LOOPBACK, GatewayConfig
from gateway.edge.bodies import BodyBudget, body_share_of
from gateway.edge.key_limits import KeyLimits, KeyShare, RouteCost, cost_of, key_share_of
from gateway.edge.key_list import KeyList
from gateway.edge.tier_bytes import TierBytes
from gateway.errors import Failure, RequestRefused
from gateway.keys import Tenant, Tenants
from gateway.middleware import headers_of
from gateway.models import ENGINE_POLL_S, Models, ServedModel
from gateway.shared.shared_sessions import SharedSessions
from gateway.stored.stored import Stored
from gateway.watch.metrics import Metrics
from gateway.watch.telemetry import LogRing, PassOn, Tracing

LAST_WORDS_S = 1.0  # for all streams to send their ending
_CALLER = "caller"  # where a request's tenant is in the scope's state
_KNOWN = "known"  # where the tenant of its key is before the request is charged


@dataclass
class Gateway:
    """The parts of one app, at ``app.state.gateway``. Only the last field ever changes."""

    config: GatewayConfig
    models: Models
    tenants: Tenants
    metrics: Metrics
    bodies: BodyBudget
    limits: KeyLimits
    keys: KeyList
    tier_bytes: TierBytes
    stored: Stored = field(default_factory=Stored)
    loading: Loading | None = None  # None: every model is loaded for as long as the server runs
    shared_sessions: SharedSessions | None = None  # None: no other server shares any with this one
    tracing: Tracing = field(default_factory=PassOn)
    log_ring: LogRing = field(default_factory=LogRing)
    hub: HubCache = field(default_factory=HubCache)
    started_at: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def has_room_for(self, tenant: Tenant, model: ServedModel, session_id: str) -> bool:
        """Say whether the tenant has that session, or may open one more.

        The limit is on the sessions of all models together. Sessions that running requests will
        open count as if they were there.
        """
        most, coming = self.limits.of(tenant).sessions, self.limits.coming(tenant)
        if not most or model.coming(session_id) in coming or model.knows(tenant, session_id):
            return True
        by_name = {x.given_name: x for x in self.models}
        apart = (x.partition("\0") for x in coming)
        num_new = sum(not by_name[name].knows(tenant, id) for name, _, id in apart)
        return sum(x.sessions.num_sessions(tenant.name) for x in self.models) + num_new < most

    async def check_new_session(self, tenant: Tenant, model: ServedModel, session_id: str) -> None:
        """Raise ``RequestRefused`` (429) if the tenant has all sessions it may, and not this one.

        Where gateways share a Redis, those at all of them count, as of half a second ago.
        """
        most = self.limits.of(tenant).sessions
        has_room = self.has_room_for(tenant, model, session_id)
        shared = self.shared_sessions
        if has_room and most and shared and not model.knows(tenant, session_id):
            has_room = await shared.has_room_for(tenant.name, session_id, most)
        if not has_room:
            message = f"This key may have {most} sessions at once. Delete some: /v1/sessions."
            raise RequestRefused(Failure(429, message, "session_id", "session_limit"))

    async def enter(self, model: ServedModel, request: Request) -> Welcome:
        """Have a model loaded until the request ends, and return its engine's account of itself.

        An engine that died first gets ``engine_wait_s`` to come back.

        Raises:
            ClientGone: the client left while the model was being loaded.
            EngineUnavailable: the engine is not ready, or not again in time.
        """
        if (on_demand := model.on_demand) is not None and self.loading is not None:
            share = key_share_of(request.scope)
            assert share is not None, "a request is charged before it asks for a model"
            await while_client_stays(
                request.receive, partial(_enter, self.loading, on_demand, caller_of(request), share)
            )
        return await model.served_soon(self.config.engine_wait_s, lambda: self.draining)

    @asynccontextmanager
    async def using(self, model: ServedModel, request: Request) -> AsyncIterator[None]:
        """Have a model loaded inside the context, for a verb. Raises as ``enter`` does.

        A deletion goes on when its client leaves.
        """
        loading, on_demand = self.loading, model.on_demand
        if on_demand is None or loading is None:
            yield
            return
        enter = partial(loading.enter, on_demand, caller_of(request).name)
        goes_on = request.method == "DELETE"
        await (enter() if goes_on else while_client_stays(request.receive, enter))
        try:
            yield
        finally:
            loading.leave(on_demand)

    @property
    def num_running(self) -> int:
        """Turns that hold a slot, of all models."""
        return sum(x.sessions.num_running for x in self.models)

    def restart_largest(self, why: str) -> None:
        """End the engine that holds most, as far as is known; see ``Engine.restart``."""
        running = [x for x in self.models if x.engine.ready] or list(self.models)
        max(running, key=lambda x: x.held_bytes).engine.restart(why)

    async def cut(self) -> None:
        """End the running turns now; a stream ends with an error event."""
        ending = asyncio.create_task(self._stop_engines(0), name="engine-cut")
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_WORDS_S
        while self.num_running and loop.time() < until:
            await asyncio.sleep(ENGINE_POLL_S)
        ending.cancel()  # the engines save and leave by themselves when this process is gone

    async def drain(self) -> None:
        """Take no new turns, and let the running ones finish within ``drain_s``.

        Streams that are cut off then end with an error event, as they do when an engine dies.
        """
        self.draining = True
        if self.loading is not None:
            self.loading.end()
        for model in self.models:
            model.live.end()
            model.sessions.stop_admitting()
        await self._stop_engines(self.config.drain_s)

    async def _stop_engines(self, drain_s: float) -> None:
        await asyncio.gather(*(x.engine.stop(drain_s) for x in self.models))


async def _enter(loading: Loading, model: OnDemand, caller: Tenant, share: KeyShare) -> None:
    """Have a model loaded until ``share`` leaves.

    There is no step between the two, in which a request that is cancelled would hold it for ever.
    """
    await loading.enter(model, caller.name)
    share.on_leaving(partial(loading.leave, model))


class PlainRoute(APIRoute):
    """A route whose function takes the request and makes the response, with nothing between.

    FastAPI's own resolve arguments and check bodies by pydantic for every request; here msgspec
    checks them, in their bounds of bytes and time.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)


def new_router() -> APIRouter:
    """Make a list of routes, for a file that has some."""
    return APIRouter(route_class=PlainRoute)


def takes(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Say which struct checks the body of a route's requests, for its ``openapi_extra``."""
    return {"body": body}


def json_response(body: object, status: int = 200) -> Response:
    """Answer with an object as JSON; bytes are JSON already."""
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(encoded, status, media_type="application/json")


def limit_of(request: Request, usual: int, most: int) -> int:
    """Read ``limit``, the rows of a list. Raises ``InvalidRequest``: it is none from 1 on."""
    given = request.query_params.get("limit") or str(usual)
    is_short = given.isascii() and given.isdigit() and len(given) <= len(str(most))
    if not (is_short and 0 < int(given) <= most):
        raise InvalidRequest(f"limit: use a number from 1 to {most}", "limit")
    return int(given)


def gateway_of(request: Request) -> Gateway:
    """Return the parts of the app that serves ``request``."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def model_asked(request: Request) -> ServedModel | None:
    """Return the model that ``?model=NAME`` names; None if the request names none.

    Raises:
        InvalidRequest: 404, no model goes by that name.
    """
    named, gateway = request.query_params.get("model"), gateway_of(request)
    return None if named is None else gateway.models.named(named, gateway.config)


def sees_all(request: Request, caller: Tenant) -> bool:
    """Say whether the caller is an admin: by its key, or as the one user of this very machine.

    Where admins have an address of their own (``gateway.admin_address``), no caller is one
    elsewhere, but on their unix socket.

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
    """Authenticate a request by its API key, and charge its route's cost to that key, once.

    On the admins' unix socket no key is looked at. Where ``gateway.trust_user_header`` names a
    header that was sent, it is that user of the key. From here on the body counts as this tenant's.

    Raises:
        InvalidRequest: 401, no key, an unknown one, or two that differ.
        RequestRefused: 429, the key has used up what it may.
    """
    state = request.scope["state"]
    if (known := state.get(_CALLER)) is not None:
        assert isinstance(known, Tenant)
        return known
    gateway, headers = gateway_of(request), headers_of(request.scope)
    if gateway.config.is_admin_socket(request.scope.get("server")):
        caller = gateway.tenants.operator()
    else:
        caller = state.get(_KNOWN) or _known(gateway, headers)
    gateway.limits.enter(caller, request.scope, cost_of(request.scope))
    body_share_of(request.scope).tenant = caller.name
    state[_CALLER] = caller
    return caller


async def count(gateway: Gateway, scope: Scope, headers: Mapping[str, str]) -> None:
    """Count a request in its key's minute, before anything waits for it.

    A request of an unknown caller, or for no route, is refused later and counts in nothing.
    """
    with suppress(InvalidRequest):
        caller = scope["state"][_KNOWN] = _known(gateway, headers)
        if gateway.limits.has_rates(caller) and (cost := _cost(scope)) is not None:
            await gateway.limits.count(caller, scope, cost)


def _cost(scope: Scope) -> RouteCost | None:
    """Find the cost of a request that was not routed yet."""
    for route in scope["app"].state.routes:
        match, found = route.matches(scope)
        if match is Match.FULL:
            return cost_of(found)
    return None


def _known(gateway: Gateway, headers: Mapping[str, str]) -> Tenant:
    tenants, trusted = gateway.tenants, gateway.config.trust_user_header
    tenant = tenants.authenticate(headers.get("authorization"), headers.get("x-api-key"))
    user = headers.get(trusted.lower()) if trusted else None
    return tenants.user(tenant, user) if user else tenant
