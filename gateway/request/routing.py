"""Routes, the fields that their functions read of a request, and their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engines.openai.errors import InvalidRequest

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class DescribedRoute(Route):
    """A route, and the struct that checks the body of its requests; None: it takes none."""

    def __init__(
        self, path: str, endpoint: Endpoint, method: str, body: type[msgspec.Struct] | None
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.methods: set[str] = {method}  # the middleware has made HEAD a GET
        self.body = body


class Routes(list[DescribedRoute]):
    """The routes of a file: ``@router.get(path)`` adds one for the function that follows."""

    def get(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return partial(self._add, "GET", path, None)

    def post(
        self, path: str, body: type[msgspec.Struct] | None = None
    ) -> Callable[[Endpoint], Endpoint]:
        return partial(self._add, "POST", path, body)

    def delete(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return partial(self._add, "DELETE", path, None)

    def _add(
        self, method: str, path: str, body: type[msgspec.Struct] | None, endpoint: Endpoint
    ) -> Endpoint:
        self.append(DescribedRoute(path, endpoint, method, body))
        return endpoint


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
