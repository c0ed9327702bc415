"""GET /v1/events: the caller's requests, sessions, memory and quality, as they change.

At most one event is on its way to a reader. While it takes that one, all that changes is gathered
by ``gateway.watch.scope``, which keeps nothing for any reader; so a slow one gets fewer and larger
events, and one that takes nothing is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engines.http import while_client_stays
from gateway.context import Gateway, caller_of, gateway_of, model_asked, sees_all
from gateway.front import wants_head_only
from gateway.keys import Tenant
from gateway.models.served_model import ServedModel
from gateway.relay.passthrough import body_part, send_end, send_head, taken
from gateway.watch.scope import Scope as LiveScope

LIFE_EVERY_S = 15.0
STALL_S = 30.0  # a reader that takes nothing for so long (or ``client_stall_s``) is cut
RETRY_MS = 2000
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies that gather answers would gather for ever
)
Take: TypeAlias = Callable[[bytes], Awaitable[None]]
GOODBYE = b"event: end\ndata: {}\n\n"
router = APIRouter()
LONGEST_NUMBER = 7
LEAST_ROWS = 50  # of a page; each is an event
MOST_ROWS = 1000  # no other request is served while one is made


class LiveEvents(Response):
    """The response to ``GET /v1/events``."""

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        caller: Tenant,
        tenant: str | None,
        last_event_id: str,
        page_rows: int = 0,
    ) -> None:
        """
        Args:
            tenant: whose sessions are reported; None = those of all.
            last_event_id: the last event that the reader has had; "" = none.
            page_rows: send a snapshot in pages of so many rows; 0 = in one piece.
        """
        super().__init__()
        self._gateway = gateway
        self._live = model.live
        self._caller = caller
        self._tenant = tenant
        self._last_event_id = last_event_id
        self._page_rows = page_rows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with (
            self._gateway.event_places.place(self._caller.name),
            self._live.reading(self._tenant) as live_scope,
        ):
            stream = partial(self._stream, live_scope, send)
            await while_client_stays(receive, stream)
            await send_end(send, GOODBYE)

    async def _stream(self, scope: LiveScope, send: Send) -> None:
        await send_head(send, 200, list(HEADERS))
        stall_s = min(STALL_S, self._gateway.config.client_stall_s)

        async def take(body: bytes) -> None:
            await taken(send, body_part(body), stall_s)

        await take(b"retry: %d\n\n" % RETRY_MS)
        last = scope.resumes(self._last_event_id)
        if last is None:
            last = scope.moment
            await self._send_snapshot(scope, take, scope.event_id(last))
        while self._goes_on():
            with suppress(TimeoutError):
                async with asyncio.timeout(LIFE_EVERY_S):
                    await scope.beyond(last)
            if not self._goes_on():  # not any more
                break
            if scope.moment > last:
                change, last = scope.change_since(last), scope.moment
                await _send_event(take, "change", scope.event_id(last), [change])
            else:
                await take(b": still here\n\n")

    async def _send_snapshot(self, scope: LiveScope, take: Take, event_id: str) -> None:
        if not self._page_rows:
            await _send_event(take, "snapshot", event_id, scope.snapshot())
            return
        pages = scope.paged(self._page_rows)
        name, pieces = next(pages)
        for next_name, next_pieces in pages:
            # Without an id: who has had a part of it only cannot go on from there.
            await _send_event(take, name, "", pieces)
            name, pieces = next_name, next_pieces
        await _send_event(take, name, event_id, pieces)

    def _goes_on(self) -> bool:
        """Say whether the reader may stay: its key may be gone, or the server may end.

        Who sees everything without a key does so only as long as there is no admin's.
        """
        tenants = self._gateway.tenants
        if self._tenant is None and not self._caller.admin and tenants.num_admin_keys:
            return False
        return not self._live.ended and tenants.holds(self._caller)


async def _send_event(take: Take, name: str, event_id: str, pieces: Iterable[bytes]) -> None:
    number = f"id: {event_id}\n" if event_id else ""
    await take(f"{number}event: {name}\ndata: ".encode())
    for piece in pieces:
        await take(piece)
        await asyncio.sleep(0)  # a snapshot is long: others get their turn
    await take(b"\n\n")


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
