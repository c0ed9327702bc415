"""Lists as OpenAI writes them, and the wanted part of one as a request names it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from gateway.stored.objects import Page, Query

MAX_ROWS = 100


def query_of(request: Request, *, ascending: bool) -> Query:
    """Read ``limit``, ``after`` and ``order``; ``ascending`` is the order if none is named.

    Raises:
        InvalidRequest: one of them is wrong.
    """
    given = request.query_params
    order = given.get("order") or ("asc" if ascending else "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: use asc or desc", "order")
    limit = given.get("limit") or "20"
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 0 < int(limit) <= MAX_ROWS):
        raise InvalidRequest(f"limit: use a number from 1 to {MAX_ROWS}", "limit")
    return Query(int(limit), given.get("after") or None, order == "asc")


def shown_list(page: Page) -> Response:
    """Answer with a page of bodies as they were stored."""
    ids = [x.id for x in page.rows]
    return shown(
        {
            "object": "list",
            "data": [msgspec.Raw(x.body) for x in page.rows],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": page.more,
        }
    )


def shown(body: Json | bytes) -> Response:
    """Answer with one object; bytes are JSON already."""
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(encoded, media_type="application/json")
