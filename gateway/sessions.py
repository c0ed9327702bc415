"""The sessions API: lists a caller's sessions, hot and cold, and moves, pins or forgets them.

Every route looks at the caller's own sessions only, so another tenant's session and one that never
existed get the same 404. An admin names another tenant by ``?tenant=NAME``.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import SessionRef, TierName
from engines.openai.requests import InvalidRequest
from gateway.body import read_json_body
from gateway.context import Gateway, admin_of, caller_of, gateway_of
from gateway.identity.names import checked_name
from gateway.keys import Tenant
from gateway.prefixes.beside import SUFFIX
from scheduler.view import SessionView

router = APIRouter()
_ONE = "/v1/sessions/{session_id:path}"  # ids may have slashes


class DemoteTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a demote: also move the cold copy down to ``tier``."""

    tier: TierName | None = None


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> Response:
    """List the caller's sessions, the codec in use and its measured cost on this model."""
    tenant, gateway = _owner(request), gateway_of(request)
    sessions = gateway.sessions.list(tenant.name)
    return _json({"object": "list", "data": sessions, "codec": gateway.engine.codec})


@router.post(_ONE + "/demote")
async def demote(request: Request) -> Response:
    """Put a session to sleep now; a tier in the body also moves its cold copy down."""
    gateway, session = _addressed(request)
    body = await read_json_body(request, gateway.config)
    try:
        to = msgspec.json.decode(body or b"{}", type=DemoteTo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is {{}} or {{'tier': NAME}}: {error}.", "tier") from error
    return _one(await gateway.sessions.demote(session, to.tier))


@router.post(_ONE + "/prefetch")
async def prefetch(request: Request) -> Response:
    """Wake a session before its next turn comes."""
    gateway, session = await _addressed_by_post(request)
    return _one(await gateway.sessions.prefetch(session))


@router.post(_ONE + "/pin")
async def pin(request: Request) -> Response:
    """Protect a session from sleep and eviction until it is unpinned."""
    gateway, session = await _addressed_by_post(request)
    return _one(await gateway.sessions.pin(session, True))


@router.post(_ONE + "/unpin")
async def unpin(request: Request) -> Response:
    gateway, session = await _addressed_by_post(request)
    return _one(await gateway.sessions.pin(session, False))


@router.get(_ONE)
async def show_session(request: Request) -> Response:
    """Show one session, its past, and how its latest prompt compares with the one before."""
    gateway, session = _addressed(request)
    view = gateway.sessions.get(session)
    if view is None:
        raise _unknown_session()
    prefix = gateway.prefixes.report(session.tenant, session.id)
    past = gateway.live.detail(session, admin=False)
    return _json(
        {
            **msgspec.to_builtins(view),
            **(msgspec.to_builtins(past.row) if past else {}),  # knows what is being answered
            "prefix": prefix,
            "timeline": past.timeline if past else [],
            "last_turns": past.last_turns if past else [],
        }
    )


@router.delete(_ONE)
async def forget(request: Request) -> Response:
    """Remove a session from every tier, for good."""
    gateway, session = _addressed(request)
    num_stored = await gateway.stored.ask(
        session.tenant, lambda objects: objects.forget(session.tenant, session.id), 0
    )
    beside = msgspec.structs.replace(session, id=session.id + SUFFIX)
    known = [await gateway.sessions.forget(x) for x in (session, beside)]
    if not any(known) and not num_stored:
        raise _unknown_session()
    for x in (session, beside):
        gateway.prefixes.forget(x.tenant, x.id)
    return _json({"id": session.id, "object": "session.deleted", "deleted": True})


def _owner(request: Request) -> Tenant:
    """Return whose sessions are meant: the caller's, or for an admin those of ``?tenant=``.

    Raises:
        InvalidRequest: 403, somebody else names a tenant that is not its own.
    """
    named = request.query_params.get("tenant")
    if named is None:
        return caller_of(request)
    caller = caller_of(request)
    if named == caller.name:
        return caller
    admin_of(request)
    name = checked_name(named, "tenant")
    return Tenant(name, gateway_of(request).tenants.salt_of(name))


def _addressed(request: Request) -> tuple[Gateway, SessionRef]:
    tenant = _owner(request)
    gateway = gateway_of(request)
    session_id = checked_name(request.path_params["session_id"], "the session's id")
    return gateway, gateway.session(tenant, session_id)


async def _addressed_by_post(request: Request) -> tuple[Gateway, SessionRef]:
    addressed = _addressed(request)
    await read_json_body(request, addressed[0].config)
    return addressed


def _one(view: SessionView | None) -> Response:
    if view is None:
        raise _unknown_session()
    return _json(view)


def _unknown_session() -> InvalidRequest:
    return InvalidRequest("There is no such session.", "session_id", "session_not_found", 404)


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
