"""GET /v1/snapshot: the caller's requests, sessions, memory and quality at this moment.

The page, ``thermocline top`` and ``thermocline sessions`` ask for it once a second. With the tag of
the last one in ``If-None-Match`` the answer is 304, and empty, while nothing has changed.
"""

from __future__ import annotations

import asyncio
import zlib
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.request.callers import caller_of, gateway_of, model_asked, sees_all
from gateway.request.routing import limit_of, new_router
from gateway.watch.snapshots import MAX_ROWS

USUAL_ROWS = 500
PACKED_FROM = 16 << 10  # bytes
router = new_router()


@router.get("/v1/snapshot")
async def show_snapshot(request: Request) -> Response:
    """Show what happens to one model now; ``limit`` sessions are listed, those used last."""
    caller, gateway = caller_of(request), gateway_of(request)
    tenant = None if sees_all(request, caller) else caller.name
    model = model_asked(request) or gateway.models.default
    made = await model.snapshots.get(tenant, limit_of(request, USUAL_ROWS, MAX_ROWS))
    headers = {"cache-control": "no-cache", "etag": f'"{made.tag}"', "vary": "accept-encoding"}
    if made.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    body = made.body
    if len(body) >= PACKED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body = await asyncio.to_thread(partial(zlib.compress, body, 1, 31))
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers, media_type="application/json")
