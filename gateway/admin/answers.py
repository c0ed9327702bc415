"""Lets admins in, and writes their answers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import Gateway, admin_of, gateway_of


def for_admin(request: Request) -> Gateway:
    """Return the parts of the app. Raises ``InvalidRequest`` (401, 403) for other callers."""
    admin_of(request)
    return gateway_of(request)


def answer(body: Any, status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(body),
        status,
        {"cache-control": "no-store"},
        media_type="application/json",
    )
