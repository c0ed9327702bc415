"""GET /v1/events: the caller's requests, sessions, memory and quality, as they change."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import caller_of, gateway_of, model_asked, sees_all
from gateway.events.event_stream import HEADERS, LiveEvents
from gateway.front import wants_head_only

router = APIRouter()
LONGEST_NUMBER = 7
LEAST_ROWS = 50  # of a page; each is an event
MOST_ROWS = 1000  # no other request is served while one is made


@router.get("/v1/events")
async def events(request: Request) -> Response:
    """Stream what happens to one model, as server-sent events: a snapshot first, then changes."""
    caller, gateway = caller_of(request), gateway_of(request)
    if wants_head_only(request.scope):  # takes no place of a stream, and ends at once
        head = Response()
        head.raw_headers = list(HEADERS)
        return head
    tenant = None if sees_all(request, caller) else caller.name
    last = request.headers.get("last-event-id", "") or request.query_params.get("last_event_id", "")
    rows = page_rows(request.query_params.get("rows", ""))
    model = model_asked(request) or gateway.models.default
    return LiveEvents(gateway, model, caller, tenant, last[:100], rows)


def page_rows(asked: str) -> int:
    """Read how many rows a page of the snapshot has; 0 = it comes in one piece."""
    if not (asked.isdecimal() and len(asked) < LONGEST_NUMBER):
        return 0
    return min(max(int(asked), LEAST_ROWS), MOST_ROWS)
