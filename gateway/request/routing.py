"""Routes, and helpers to read a request's fields and to answer it."""

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
    """A route whose function gets the request and returns the response, without any other step.

    FastAPI's routes resolve arguments and validate bodies by pydantic for each request. Here
    ``gateway.request.body`` reads bodies within bounds of bytes and time, and msgspec checks them.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)


def new_router() -> APIRouter:
    """Return a router whose routes are ``PlainRoute``s."""
    return APIRouter(route_class=PlainRoute)


def takes(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a route's ``openapi_extra``, which names the struct of its request's body."""
    return {"body": body}


def json_response(body: object, status: int = 200) -> Response:
    """Answer with an object as JSON, or with bytes that are JSON already."""
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(encoded, status, media_type="application/json")


def limit_of(request: Request, usual: int, most: int, least: int = 1) -> int:
    """Return ``?limit``, the number of rows of a list.

    Raises:
        InvalidRequest: the limit is no number from ``least`` to ``most``.
    """
    given = request.query_params.get("limit") or str(usual)
    is_short = given.isascii() and given.isdigit() and len(given) <= len(str(most))
    if not (is_short and least <= int(given) <= most):
        raise InvalidRequest(f"limit: use a number from {least} to {most}", "limit")
    return int(given)
