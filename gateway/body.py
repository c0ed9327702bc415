"""Request bodies: JSON only, of bounded size, in bounded time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from engines.asgi import read_body
from engines.openai.errors import InvalidRequest
from gateway.config import GatewayConfig
from gateway.edge.body_budget import body_share_of


async def read_json_body(request: Request, config: GatewayConfig) -> bytes:
    """Read the whole body; it is not parsed here.

    Its bytes count in the budget of all bodies, as its caller's, until ``body_share_of`` is given
    back.

    Raises:
        Refused: 503, the bodies of all requests take too much.
        InvalidRequest: it takes too long (408), is too large (413) or not declared as JSON (415).
    """
    _check_encoding(request)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            share = body_share_of(request.scope)
            return await read_body(request, config.max_body_bytes, share.grow)
    except TimeoutError:
        raise InvalidRequest("The request's body took too long to arrive.", status=408) from None


def _check_encoding(request: Request) -> None:
    """Refuse types that a page of a foreign origin may send without asking first (no preflight)."""
    if not _has_body(request):
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("Send Content-Type: application/json.", status=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("Send the body without Content-Encoding.", status=415)


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
