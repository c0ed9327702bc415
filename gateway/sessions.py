"""The sessions API: lists a caller's sessions, hot and cold, and moves, pins or forgets them.

Every route looks at the caller's own sessions only, so another tenant's session and one that never
existed get the same 404. An admin names another tenant by ``?tenant=NAME``. If several models are
served, ``?model=NAME`` restricts a request to the sessions of one. Without it a list has the
sessions of all, a deletion removes all with the given id, and any other verb applies to the one of
them that was used last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import TIERS, EngineError, SessionRef, TierName
from engines.openai.requests import InvalidRequest
from gateway.errors import RETRY_LATER_S, Failure, RequestRefused
from gateway.identity.names import SUFFIX, TASK_SUFFIX, checked_name
from gateway.keys import Tenant
from gateway.models import ServedModel
from gateway.request.body import read_json_body
from gateway.request.callers import admin_of, charged_caller, gateway_of, model_asked, using
from gateway.request.routing import json_response, limit_of, new_router, takes
from gateway.shared.session_rows import SessionRow
from gateway.shared.shared_sessions import Elsewhere
from gateway.stored.table import StoreFailed
from scheduler.session import SAVING, Kind, SessionView
from scheduler.sessions import CONVERSATIONS, ListCursor, Overloaded

router = new_router()
MAX_ROWS = 1000  # of one list: takes some milliseconds, during which all other requests wait
_ONE = "/v1/sessions/{session_id:path}"  # ids may have slashes


class DemoteTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a demote; with ``tier``, the cold copy is moved down to that tier as well."""

    tier: TierName | None = None


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> Response:
    """List the caller's sessions, the codec in use and its measured cost on this model.

    Sessions of tasks are listed only with ``?kind=task``. If there are more rows than ``limit``,
    the answer has ``next``: the value of ``after`` for the following page.
    """
    tenant, models = _owner(request), _models(request)
    limit, (number, after) = limit_of(request, MAX_ROWS, MAX_ROWS), _after(request)
    kinds = _kinds(request)
    rows: list[tuple[int, SessionView]] = []
    beyond = int(after[0]) if after is not None and number == len(models) else None
    for i, model in enumerate(models[number:], number):
        few = model.sessions.list(tenant.name, limit + 1 - len(rows), after, kinds)
        rows += [(i, x) for x in few]
        after = None
    data = [shown(models[i], view) for i, view in rows[:limit]]
    listed: dict[str, Any] = {"object": "list", "data": data, "codec": models[0].engine.codec}
    if len(rows) > limit:
        i, last = rows[limit - 1]
        place = models[i].sessions.place(tenant.session(last.id))
        assert place is not None, "the table has not changed since the list was made"
        listed["next"] = f"{i}/{place[0]!r}/{place[1]}"
    elif kinds == CONVERSATIONS:
        await _add_elsewhere(request, tenant, listed, limit - len(rows), beyond)
    if used := gateway_of(request).tier_bytes.used(tenant.name):
        listed["tier_bytes"] = used
    if unlisted := [x.label for x in models if not x.is_listed]:
        listed["unlisted_models"] = unlisted  # not loaded since the server's start
    return json_response(listed)


@router.post(_ONE + "/demote", openapi_extra=takes(DemoteTo))
async def demote(request: Request) -> Response:
    """Put a session to sleep now; a tier in the body also moves its cold copy down.

    While the session is still being saved the answer is 202; it sleeps once it is saved.
    """
    session = _session(request)
    body = await read_json_body(request, gateway_of(request).config)
    try:
        to = msgspec.json.decode(body or b"{}", type=DemoteTo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        names = ", ".join(TIERS)
        message = f"The body is {{}} or {{'tier': NAME}}; tiers are {names}: {error}."
        raise InvalidRequest(message, "tier") from error
    return await _carried_out(request, session, "demote", to.tier)


@router.post(_ONE + "/prefetch")
async def prefetch(request: Request) -> Response:
    """Wake a session before its next turn comes."""
    return await _verb(request, "prefetch")


@router.post(_ONE + "/pin")
async def pin(request: Request) -> Response:
    """Protect a session from sleep and eviction until it is unpinned."""
    return await _verb(request, "pin")


@router.post(_ONE + "/unpin")
async def unpin(request: Request) -> Response:
    return await _verb(request, "unpin")


@router.get(_ONE)
async def show_session(request: Request) -> Response:
    """Show a session, its history, and how its latest prompt differs from the one before."""
    session = _session(request)
    model = _model_of(request, session)
    view = model.sessions.get(session) if model else None
    if model is None or view is None:
        return json_response(await _shown_elsewhere(request, session))
    prefix = model.prefixes.report(session.tenant, session.id)
    past = model.snapshots.detail(session)
    return json_response(
        {
            **shown(model, view),
            **(msgspec.to_builtins(past.row) if past else {}),  # counts the answer in progress
            "prefix": prefix,
            "timeline": past.timeline if past else [],
            "last_turns": past.last_turns if past else [],
        }
    )


@router.delete(_ONE)
async def forget(request: Request) -> Response:
    """Remove a session from every tier, for good."""
    session, gateway = _session(request), gateway_of(request)
    rows = [msgspec.structs.replace(session, id=session.id + x) for x in ("", SUFFIX, TASK_SUFFIX)]
    models, known = _models(request), []
    elsewhere = Elsewhere()
    if (shared := gateway.shared_sessions) is not None:
        elsewhere = await shared.delete(rows, models, _model_name(request))
    unseen: dict[str, Exception] = {}  # models that could not be loaded to look for it
    kept: Exception | None = None  # why a part of it could not be removed
    for model in models:  # one after the other: a request that uses two could wait for itself
        if not any(map(model.may_have, rows)):
            continue
        try:
            async with using(gateway, model, request):
                known += [await model.sessions.forget(x) for x in rows]
        except (EngineError, Overloaded) as error:
            if model.is_listed:  # the session exists there, and could not be removed
                kept = error
            else:
                unseen[model.label] = error
    num_stored = 0
    try:  # last, when no turn of it can store anything any more
        num_stored = await gateway.stored.ask(
            session.tenant, lambda objects: objects.forget(session.id), 0
        )
    except StoreFailed as error:
        kept = kept or error
    if kept is not None:
        raise kept
    if not any(known) and not num_stored and not elsewhere.rows:
        raise next(iter(unseen.values()), _unknown(elsewhere))
    for model in models:
        for x in rows:
            model.prefixes.forget(x.tenant, x.id)
    deleted = {"id": session.id, "object": "session.deleted", "deleted": True}
    if elsewhere.is_away:
        deleted["only_here"] = True  # other servers receive it when Redis answers again
    return json_response(deleted | ({"unlisted_models": sorted(unseen)} if unseen else {}))


def _after(request: Request) -> tuple[int, ListCursor | None]:
    """Parse ``?after``: return a model's number, and the place in its list (None = the start)."""
    if not (given := request.query_params.get("after")):
        return 0, None
    found = re.fullmatch(r"([0-9]{1,4})/([0-9.e+-]{1,32})/(.+)", given, re.DOTALL)
    with suppress(ValueError):  # no number after all
        if found is not None and math.isfinite(last_used := float(found[2])):
            return int(found[1]), (last_used, found[3])
    raise InvalidRequest("after: use what an earlier list says as `next`", "after")


def _kinds(request: Request) -> Collection[Kind]:
    """Return the kinds of sessions that ``?kind`` asks for."""
    match request.query_params.get("kind"):
        case None:
            return CONVERSATIONS
        case "main" | "child" | "task" as kind:
            return (kind,)
    raise InvalidRequest("kind: use main, child or task", "kind")


def _owner(request: Request) -> Tenant:
    """Return the tenant whose sessions a request is about: the caller, or an admin's ``?tenant=``.

    Raises:
        InvalidRequest: 403, a caller that is no admin names another tenant.
    """
    named = request.query_params.get("tenant")
    if named is None:
        return charged_caller(request)
    caller = charged_caller(request)
    if named == caller.name:
        return caller
    admin_of(request)
    name = checked_name(named, "tenant")
    return Tenant(name, gateway_of(request).tenants.salt_of(name))


def _models(request: Request) -> list[ServedModel]:
    """Return the model that ``?model=`` names, or all."""
    asked = model_asked(request)
    return list(gateway_of(request).models) if asked is None else [asked]


def _session(request: Request) -> SessionRef:
    tenant = _owner(request)
    return tenant.session(checked_name(request.path_params["session_id"], "the session's id"))


def _model_of(request: Request, session: SessionRef) -> ServedModel | None:
    """Return the model that had a session last; None if no model can have it."""
    models = _models(request)
    known = [(view.idle_s, x) for x in models if (view := x.sessions.get(session))]
    if known:
        return min(known, key=lambda x: x[0])[1]
    return next((x for x in models if x.may_have(session)), None)


async def _verb(request: Request, verb: str) -> Response:
    session = _session(request)
    await read_json_body(request, gateway_of(request).config)
    return await _carried_out(request, session, verb)


async def _carried_out(
    request: Request, session: SessionRef, verb: str, tier: TierName | None = None
) -> Response:
    """Carry out a verb on a session of this server."""
    model = _model_of(request, session)
    if model is None:
        raise _not_here(await _elsewhere(request, session))
    view = None
    if verb == "demote" and model.state == "unloaded":
        view = model.sessions.get(session)  # it sleeps already, as deep as it can
    else:
        async with using(gateway_of(request), model, request):
            match verb:
                case "demote":
                    view = await model.sessions.demote(session, tier)
                case "prefetch":
                    view = await model.sessions.prefetch(session)
                case _:
                    view = await model.sessions.pin(session, verb == "pin")
    if view is None:
        raise _not_here(await _elsewhere(request, session))
    status = 202 if view.state == SAVING else 200
    return json_response(shown(model, view), status)


def shown(model: ServedModel, view: SessionView) -> dict[str, Any]:
    """Return the JSON row of a session of this server."""
    return {**msgspec.to_builtins(view), "model": model.label}


# ---- sessions of other servers


def _model_name(request: Request) -> str:
    """Return the name of the model that ``?model=`` asks for; "" = all."""
    asked = model_asked(request)
    return "" if asked is None else asked.label


async def _add_elsewhere(
    request: Request, tenant: Tenant, listed: dict[str, Any], most: int, below: int | None
) -> None:
    """Add the sessions to a list that this server does not have, and other servers used last.

    Args:
        most: the largest number of rows to add.
        below: the cursor of the shared list, from an earlier ``next``; None = its start.
    """
    models, shared = _models(request), gateway_of(request).shared_sessions
    if shared is None:
        return
    page = await shared.page(tenant.name, most, below)
    if page is None:
        listed["only_here"] = True  # Redis does not answer
        return
    own, named = {x.label: x for x in models}, model_asked(request)

    def is_meant(row: SessionRow) -> bool:
        model = own.get(row.model)
        return named is None if model is None else not model.knows(tenant, row.id)

    listed["data"] += [shared.shown(x) for x in page.rows if is_meant(x)]
    if page.next is not None:
        listed["next"] = f"{len(models)}/{page.next}/-"


async def _elsewhere(request: Request, session: SessionRef) -> Elsewhere:
    shared = gateway_of(request).shared_sessions
    if shared is None:
        return Elsewhere()
    return await shared.elsewhere(session.tenant, session.id, _model_name(request))


async def _shown_elsewhere(request: Request, session: SessionRef) -> dict[str, Any]:
    """Return the JSON row of a session that only other servers have: of several, the last used.

    Raises the error of ``_unknown`` if there is none.
    """
    found, shared = await _elsewhere(request, session), gateway_of(request).shared_sessions
    if shared is None or not found.rows:
        raise _unknown(found)
    return shared.shown(found.rows[0])


def _not_here(found: Elsewhere) -> Exception:
    """Return the error for a verb on a session that this server does not have."""
    if not found.rows:
        return _unknown(found)
    message = (
        "Another server had this session last: send this request to that server. The session's"
        " next turn may go to any server."
    )
    return InvalidRequest(message, "session_id", "session_elsewhere", 409)


def _unknown(found: Elsewhere) -> Exception:
    """Return the error for a session that no server knows: 404, or 503 if Redis is away."""
    if not found.is_away:
        return InvalidRequest("There is no such session.", "session_id", "session_not_found", 404)
    message = (
        "This server has no such session, and Redis, which lists the sessions of other servers,"
        " does not answer. Try again later."
    )
    return RequestRefused(Failure(503, message, "session_id", "redis_away", RETRY_LATER_S))
