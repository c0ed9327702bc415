"""Authenticates the caller of a request, and charges it; no other part of the gateway charges.

    count            counts the request in its key's minute, before it waits for anything
    charged_caller   authenticates, and takes a place among the key's running requests; from then
                     on the body's bytes count for this caller
    enter            has the model loaded until the request ends
    charge_session   counts the session of a turn
    RequestState     counts the tokens of prompt and answer when they are known (``used_tokens``),
                     and gives back place, session and bytes at the end of the answer

``edge/key_limits`` (with ``edge/rates``) and ``edge/bodies`` have the limits. A tenant's bytes in
tiers are limited by the engines (``edge/tier_bytes``), its share of the engines by
``scheduler.admission``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.routing import Match
from starlette.types import Scope

from engines.http import while_client_stays
from engines.openai.errors import InvalidRequest
from engines.pool.loading import Loading
from engines.pool.on_demand import OnDemand
from engines.wire import Welcome
from gateway.config import LOOPBACK
from gateway.edge.bodies import BodyShare
from gateway.edge.key_limits import KeyShare, RouteCost, cost_of
from gateway.edge.rates import Taken
from gateway.errors import Failure, RequestRefused
from gateway.gateway import Gateway
from gateway.keys import Tenant
from gateway.models import ServedModel


@dataclass
class RequestState:
    """The facts and the shares of one request, until its answer has ended."""

    id: str
    headers: Mapping[str, str]  # by names in lower case; the first one of several
    body: BodyShare  # bytes in the budget of all bodies
    known: Tenant | None = None  # the owner of its key, before it is charged
    taken: Taken = Taken()  # the result of counting it in its key's minute
    caller: Tenant | None = None  # set once it is charged
    place: KeyShare | None = None  # None: its route counts in no limits
    session: str | None = None  # id of a turn's session, for the log
    num_replaced: int = 0  # lone surrogates in its body

    def used_tokens(self, number: int) -> None:
        """Count the tokens of a prompt and its answer in the key's minute."""
        if self.place is not None:
            self.place.used_tokens(number)

    def ended(self) -> None:
        """Give back the request's shares."""
        self.body.give_back()
        if self.place is not None:
            self.place.leave()


def state_of(scope: Scope) -> RequestState:
    """Return the state that the middleware has made for a request."""
    state = scope["state"]["request"]
    assert isinstance(state, RequestState)
    return state


def gateway_of(request: Request) -> Gateway:
    """Return the parts of the app that serves ``request``."""
    gateway: Gateway = request.scope["app"].state.gateway
    return gateway


def model_asked(request: Request) -> ServedModel | None:
    """Return the model that ``?model=NAME`` names; None if the request names none.

    Raises:
        InvalidRequest: 404, no model has that name.
    """
    named, gateway = request.query_params.get("model"), gateway_of(request)
    return None if named is None else gateway.models.named(named, gateway.config)


def sees_all(request: Request, caller: Tenant) -> bool:
    """Return whether the caller is an admin: by its key, by the socket, or as the only user.

    If admins have their own address (``gateway.admin_address``), callers are admins only there and
    on the unix socket.

    A server on loopback that needs no key has one user, who owns its process anyway, unless there
    is an admin key. The checks of ``Host`` and ``Origin`` keep out web pages.
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
    """Authenticate a request that only an admin may send; return the caller.

    Raises:
        InvalidRequest: 401, no key or an unknown one; 403, the caller is no admin.
    """
    caller = charged_caller(request)
    if sees_all(request, caller):
        return caller
    port = gateway_of(request).config.admin_port
    where = f" on port {port}" if port else ""
    message = f"This needs an admin key{where}; see gateway.admin_keys."
    raise InvalidRequest(message, None, "admin_only", 403)


def charged_caller(request: Request) -> Tenant:
    """Authenticate a request by its API key, and charge its route's cost to the key, once.

    On the admins' unix socket no key is read. If the request has the header that
    ``gateway.trust_user_header`` names, the caller is that user of the key. From here on the body's
    bytes count for the caller.

    Raises:
        InvalidRequest: 401, no key, an unknown one, or two that differ.
        RequestRefused: 429, a limit of the key is reached.
    """
    state, gateway = state_of(request.scope), gateway_of(request)
    if state.caller is not None:
        return state.caller
    if gateway.config.is_admin_socket(request.scope.get("server")):
        caller = gateway.tenants.operator()
    else:
        caller = state.known or _known(gateway, state.headers)
    state.place = gateway.limits.enter(caller, cost_of(request.scope), state.taken)
    state.body.tenant = caller.name
    state.caller = caller
    return caller


async def count(gateway: Gateway, scope: Scope) -> None:
    """Count a request in its key's minute, before it waits for anything.

    A request from an unknown caller, or to an unknown path, is refused later, and not counted.
    """
    state = state_of(scope)
    with suppress(InvalidRequest):
        caller = state.known = _known(gateway, state.headers)
        if gateway.limits.has_rates(caller) and (cost := _cost(scope)) is not None:
            state.taken = await gateway.limits.count(caller, cost)


async def enter(gateway: Gateway, model: ServedModel, request: Request) -> Welcome:
    """Have a model loaded until the request ends; return its engine's properties.

    If the engine has died, wait up to ``engine_wait_s`` for its restart.

    Raises:
        ClientGone: the client left while the model was being loaded.
        EngineUnavailable: the engine is not ready, or not again in time.
    """
    if (on_demand := model.on_demand) is not None and gateway.loading is not None:
        state = state_of(request.scope)
        assert state.caller and state.place, "a request is charged before it asks for a model"
        entering = partial(_enter, gateway.loading, on_demand, state.caller, state.place)
        await while_client_stays(request.receive, entering)
    return await model.served_soon(gateway.config.engine_wait_s, lambda: gateway.draining)


async def _enter(loading: Loading, model: OnDemand, caller: Tenant, share: KeyShare) -> None:
    """Have a model loaded until ``share`` leaves.

    Nothing is awaited between the two calls: a request cancelled there would hold the model for
    ever.
    """
    await loading.enter(model, caller.name)
    share.on_leaving(partial(loading.leave, model))


@asynccontextmanager
async def using(gateway: Gateway, model: ServedModel, request: Request) -> AsyncIterator[None]:
    """Have a model loaded inside the context, for a verb. Raises as ``enter`` does.

    A deletion continues to wait after its client has left.
    """
    loading, on_demand = gateway.loading, model.on_demand
    if on_demand is None or loading is None:
        yield
        return
    entering = partial(loading.enter, on_demand, charged_caller(request).name)
    goes_on = request.method == "DELETE"
    await (entering() if goes_on else while_client_stays(request.receive, entering))
    try:
        yield
    finally:
        loading.leave(on_demand)


def has_room_for(gateway: Gateway, tenant: Tenant, model: ServedModel, session_id: str) -> bool:
    """Return whether the tenant has that session, or may open one more.

    The limit is on the sessions of all models together, including those that running requests are
    about to open.
    """
    most, coming = gateway.limits.of(tenant).sessions, gateway.limits.coming(tenant)
    if not most or model.coming_key(session_id) in coming or model.knows(tenant, session_id):
        return True
    by_name = {x.given_name: x for x in gateway.models}
    apart = (x.partition("\0") for x in coming)
    num_new = sum(not by_name[name].knows(tenant, id) for name, _, id in apart)
    return sum(x.sessions.num_sessions(tenant.name) for x in gateway.models) + num_new < most


async def charge_session(request: Request, model: ServedModel, session_id: str) -> None:
    """Count the session of a turn among its caller's sessions, until the turn ends.

    If gateways share a Redis, the sessions at all of them count, as of half a second ago.

    Raises:
        RequestRefused: 429, the session is new, and the caller has as many as its limit.
    """
    gateway, tenant = gateway_of(request), charged_caller(request)
    place = state_of(request.scope).place
    assert place is not None, "a turn has a place"
    most = gateway.limits.of(tenant).sessions
    has_room = has_room_for(gateway, tenant, model, session_id)
    shared = gateway.shared_sessions
    if has_room and most and shared and not model.knows(tenant, session_id):
        has_room = await shared.has_room_for(tenant.name, session_id, most)
    if not has_room:
        message = f"This key may have {most} sessions at once. Delete some: /v1/sessions."
        raise RequestRefused(Failure(429, message, "session_id", "session_limit"))
    gateway.limits.comes(tenant, model.coming_key(session_id), place)


def _cost(scope: Scope) -> RouteCost | None:
    """Return the cost of a request that was not routed yet; None if no route takes it."""
    for route in scope["app"].routes:
        match, found = route.matches(scope)
        if match is Match.FULL:
            return cost_of(found)
    return None


def _known(gateway: Gateway, headers: Mapping[str, str]) -> Tenant:
    tenants, trusted = gateway.tenants, gateway.config.trust_user_header
    tenant = tenants.authenticate(headers.get("authorization"), headers.get("x-api-key"))
    user = headers.get(trusted.lower()) if trusted else None
    return tenants.user(tenant, user) if user else tenant
