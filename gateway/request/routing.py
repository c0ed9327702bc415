"""Routes, the fields that their functions read of a request, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response

from engines.openai.errors import InvalidRequest


class PlainRoute(APIRoute):
    """A route whose function takes the request and makes the response, with nothing between.

    FastAPI's own resolve arguments and check bodies by pydantic for every request; here msgspec
    checks them, in their bounds of bytes and time.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)


def new_router() -> APIRouter:
    """Make a list of routes, for a file that has some."""
    return APIRouter(route_class=PlainRoute)


def takes(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Say which struct checks the body of a route's requests, for its ``openapi_extra``."""
    return {"body": body}


def json_response(body: object, status: int = 200) -> Response:
    """Answer with an object as JSON; bytes are JSON already."""
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(encoded, status, media_type="application/json")


def limit_of(request: Request, usual: int, most: int, least: int = 1) -> int:
    """Read ``limit``, the rows of a list. Raises ``InvalidRequest``: it is out of bounds."""
    given = request.query_params.get("limit") or str(usual)
    is_short = given.isascii() and given.isdigit() and len(given) <= len(str(most))
    if not (is_short and least <= int(given) <= most):
        raise InvalidRequest(f"limit: use a number from {least} to {most}", "limit")
    return int(given)
