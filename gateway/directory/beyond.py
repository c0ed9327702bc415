"""Lists, shows and deletes sessions of other servers for the sessions API."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from starlette.responses import Response

from engines.base import EngineError, SessionRef, TierName
from engines.openai.requests import InvalidRequest
from gateway.directory.directory import Directory, Elsewhere
from gateway.errors import RETRY_LATER_S, Failure, Refused
from gateway.models.served_model import ServedModel
from kvstore.errors import TierUnavailable
from scheduler.session import SessionView

LATER_S: Final = 1.0  # of two servers that use the same engines, each has its own sessions


class Found(NamedTuple):
    """The sessions that other servers have, of those that a request is about."""

    rows: Sequence[Elsewhere] = ()
    is_away: bool = False  # the directory does not answer, so others may have more


async def found_elsewhere(
    directory: Directory | None, tenant: str, model: str, id: str | None = None
) -> Found:
    """List what others have of a tenant, each session once; all of it, or one session.

    Args:
        model: its name; "" = of all models.
    """
    if directory is None:
        return Found()
    try:
        rows = await directory.elsewhere(tenant, id)
    except TierUnavailable:
        return Found(is_away=True)
    once: dict[tuple[str, str], Elsewhere] = {}
    for each in rows:
        if model in ("", each.row.model):
            once.setdefault((each.row.model, each.row.id), each)
    return Found(list(once.values()))


def shown_elsewhere(found: Elsewhere) -> dict[str, Any]:
    """Show a session of another server as the sessions API shows one's own."""
    row = found.row
    return {
        "id": row.id,
        "state": row.state if found.lives else "cold",
        "tier": row.tier,
        "tokens": row.tokens,
        "bytes": row.nbytes,
        "idle_s": round(found.idle_s, 3),
        "pinned": row.pinned,
        "kind": row.kind,
        "parent": row.parent,
        "retain_s": row.retain_s,
        "model": row.model,
        "server": found.server,
        "server_lives": found.lives,
    }


def used_later(found: Found, own: SessionView | None) -> Elsewhere | None:
    """Return where a session was used later than here; None if that is this server."""
    first = next(iter(found.rows), None)
    if first is None or own is None:
        return first
    return first if first.lives and first.idle_s + LATER_S < own.idle_s else None


async def carried_out_elsewhere(
    directory: Directory | None,
    holder: Elsewhere,
    verb: str,
    session: SessionRef,
    tier: TierName | None,
) -> Response:
    """Have another server carry out a verb, and pass its answer on.

    Raises:
        Refused: 404, the session is gone; 503, that server does not answer.
    """
    assert directory is not None
    result = await directory.ask(holder, verb, session.tenant, tier)
    if result.body:
        return Response(result.body, result.status, media_type="application/json")
    if result.status == HTTPStatus.NOT_FOUND:
        raise InvalidRequest("There is no such session.", "session_id", "session_not_found", 404)
    message = f"Server {holder.server}, which has this session, does not answer. Try again later."
    raise Refused(Failure(503, message, "session_id", "server_away", RETRY_LATER_S))


async def delete_everywhere(
    directory: Directory | None,
    sessions: Sequence[SessionRef],
    models: Sequence[ServedModel],
    model: str,
) -> Found:
    """Have all servers remove sessions of one tenant, if any of them has one.

    What engines of other servers left in tiers that are shared is removed by our own engines.

    Args:
        models: of this server, that are meant.
        model: the name that was asked for; "" = all.

    Returns:
        What others had. ``is_away``: they learn of it when the directory answers again.
    """
    if directory is None:
        return Found()
    tenant, ids = sessions[0].tenant, [x.id for x in sessions]
    parts = [await found_elsewhere(directory, tenant, model, id) for id in ids]
    rows = [row for part in parts for row in part.rows]
    if rows or any(x.sessions.get(ref) for x in models for ref in sessions):
        said = await directory.delete(tenant, ids, model)
    else:
        said = not any(x.is_away for x in parts)
    for each in rows:
        for own in models:
            if own.label == each.row.model and own.is_there:
                ref = next(x for x in sessions if x.id == each.row.id)
                with suppress(EngineError):  # an engine that is away has nothing of it
                    await own.sessions.forget_deleted(ref)
    return Found(rows, not said)


def unknown_while_away() -> Refused:
    """Make the answer about a session that is not known here, while others cannot be asked."""
    message = (
        "This server has no such session, and the directory of other servers' sessions does not"
        " answer. Try again later."
    )
    return Refused(Failure(503, message, "session_id", "directory_away", RETRY_LATER_S))
