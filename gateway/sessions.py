"""The sessions API: lists a caller's sessions, hot and cold, and moves, pins or forgets them.

Every route looks at the caller's own sessions only, so another tenant's session and one that never
existed get the same 404. An admin names another tenant by ``?tenant=NAME``. Where several models
are served, ``?model=NAME`` narrows a request to the sessions of one; without it a list has those of
all, a verb means the session that was used last of those with its id, and a deletion means all.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import EngineUnavailable, SessionRef, TierName
from engines.openai.requests import InvalidRequest
from gateway.body import read_json_body
from gateway.context import admin_of, caller_of, gateway_of, model_asked
from gateway.identity.names import checked_name
from gateway.keys import Tenant
from gateway.models.served_model import ServedModel
from gateway.prefixes.beside import SUFFIX
from scheduler.sessions import Overloaded, Place
from scheduler.view import SessionView

router = APIRouter()
MAX_ROWS = 1000  # of one list: some milliseconds of work, for which all other requests wait
_ONE = "/v1/sessions/{session_id:path}"  # ids may have slashes


class DemoteTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a demote: also move the cold copy down to ``tier``."""

    tier: TierName | None = None


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> Response:
    """List the caller's sessions, the codec in use and its measured cost on this model.

    Where there are more than ``limit``, ``next`` is to be sent as ``after`` for those that follow.
    """
    tenant, models = _owner(request), _models(request)
    limit, (number, after) = _limit(request), _after(request)
    rows: list[tuple[int, SessionView]] = []
    for i, model in enumerate(models[number:], number):
        few = model.sessions.list(tenant.name, limit + 1 - len(rows), after)
        rows += [(i, x) for x in few]
        after = None
    data = [_row(models[i], view) for i, view in rows[:limit]]
    listed: dict[str, Any] = {"object": "list", "data": data, "codec": models[0].engine.codec}
    if len(rows) > limit:
        i, last = rows[limit - 1]
        place = models[i].sessions.place(tenant.session(last.id))
        assert place is not None, "nothing has changed since it was listed"
        listed["next"] = f"{i}/{place[0]!r}/{place[1]}"
    if unlisted := [x.label for x in models if not x.is_listed]:
        listed["unlisted_models"] = unlisted  # not loaded since the server's start
    return _json(listed)


@router.post(_ONE + "/demote")
async def demote(request: Request) -> Response:
    """Put a session to sleep now; a tier in the body also moves its cold copy down."""
    model, session = _addressed(request)
    body = await read_json_body(request, gateway_of(request).config)
    try:
        to = msgspec.json.decode(body or b"{}", type=DemoteTo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is {{}} or {{'tier': NAME}}: {error}.", "tier") from error
    if model.state == "unloaded":  # then it sleeps already, as deep as it can
        return _one(model, model.sessions.get(session))
    async with gateway_of(request).using(model, request):
        return _one(model, await model.sessions.demote(session, to.tier))


@router.post(_ONE + "/prefetch")
async def prefetch(request: Request) -> Response:
    """Wake a session before its next turn comes."""
    model, session = await _addressed_by_post(request)
    async with gateway_of(request).using(model, request):
        return _one(model, await model.sessions.prefetch(session))


@router.post(_ONE + "/pin")
async def pin(request: Request) -> Response:
    """Protect a session from sleep and eviction until it is unpinned."""
    model, session = await _addressed_by_post(request)
    async with gateway_of(request).using(model, request):
        return _one(model, await model.sessions.pin(session, True))


@router.post(_ONE + "/unpin")
async def unpin(request: Request) -> Response:
    model, session = await _addressed_by_post(request)
    async with gateway_of(request).using(model, request):
        return _one(model, await model.sessions.pin(session, False))


@router.get(_ONE)
async def show_session(request: Request) -> Response:
    """Show one session, its past, and how its latest prompt compares with the one before."""
    model, session = _addressed(request)
    view = model.sessions.get(session)
    if view is None:
        raise _unknown_session()
    prefix = model.prefixes.report(session.tenant, session.id)
    past = model.live.detail(session, admin=False)
    return _json(
        {
            **_row(model, view),
            **(msgspec.to_builtins(past.row) if past else {}),  # knows what is being answered
            "prefix": prefix,
            "timeline": past.timeline if past else [],
            "last_turns": past.last_turns if past else [],
        }
    )


@router.delete(_ONE)
async def forget(request: Request) -> Response:
    """Remove a session from every tier, for good."""
    session, gateway = _session(request), gateway_of(request)
    num_stored = await gateway.stored.ask(
        session.tenant, lambda objects: objects.forget(session.tenant, session.id), 0
    )
    beside = msgspec.structs.replace(session, id=session.id + SUFFIX)
    models, known = _models(request), []
    unseen: dict[str, Exception] = {}  # models that could not be loaded to look for it
    for model in models:  # one after the other: to use two at once would be to wait for oneself
        if not model.may_have(session) and not model.may_have(beside):
            continue
        try:
            async with gateway.using(model, request):
                known += [await model.sessions.forget(x) for x in (session, beside)]
        except (EngineUnavailable, Overloaded) as error:
            if model.is_listed:  # it is there, and stays
                raise
            unseen[model.label] = error
    if not any(known) and not num_stored:
        raise next(iter(unseen.values()), _unknown_session())
    for model in models:
        for x in (session, beside):
            model.prefixes.forget(x.tenant, x.id)
    deleted = {"id": session.id, "object": "session.deleted", "deleted": True}
    return _json(deleted | ({"unlisted_models": sorted(unseen)} if unseen else {}))


def _limit(request: Request) -> int:
    given = request.query_params.get("limit") or str(MAX_ROWS)
    if not (given.isascii() and given.isdigit() and len(given) < 5 and 0 < int(given) <= MAX_ROWS):
        raise InvalidRequest(f"limit: use a number from 1 to {MAX_ROWS}", "limit")
    return int(given)


def _after(request: Request) -> tuple[int, Place | None]:
    """Return the number of the model, and the place in its list, that ``after`` names."""
    if not (given := request.query_params.get("after")):
        return 0, None
    found = re.fullmatch(r"([0-9]{1,4})/([0-9.e+-]{1,32})/(.+)", given, re.DOTALL)
    with suppress(ValueError):  # no number after all
        if found is not None:
            return int(found[1]), (float(found[2]), found[3])
    raise InvalidRequest("after: use what an earlier list says as `next`", "after")


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


def _models(request: Request) -> list[ServedModel]:
    """List the models whose sessions are meant."""
    asked = model_asked(request)
    return list(gateway_of(request).models) if asked is None else [asked]


def _session(request: Request) -> SessionRef:
    tenant = _owner(request)
    return tenant.session(checked_name(request.path_params["session_id"], "the session's id"))


def _addressed(request: Request) -> tuple[ServedModel, SessionRef]:
    """Return the session that is meant, and its model: of several the one that had it last.

    Raises:
        InvalidRequest: 404, no model can have it: none is loaded to look for it.
    """
    session, models = _session(request), _models(request)
    known = [(view.idle_s, x) for x in models if (view := x.sessions.get(session))]
    if known:
        return min(known, key=lambda x: x[0])[1], session
    if unseen := [x for x in models if x.may_have(session)]:
        return unseen[0], session
    raise _unknown_session()


async def _addressed_by_post(request: Request) -> tuple[ServedModel, SessionRef]:
    addressed = _addressed(request)
    await read_json_body(request, gateway_of(request).config)
    return addressed


def _row(model: ServedModel, view: SessionView) -> dict[str, Any]:
    return {**msgspec.to_builtins(view), "model": model.label}


def _one(model: ServedModel, view: SessionView | None) -> Response:
    if view is None:
        raise _unknown_session()
    return _json(_row(model, view))


def _unknown_session() -> InvalidRequest:
    return InvalidRequest("There is no such session.", "session_id", "session_not_found", 404)


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
