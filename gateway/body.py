"""Request bodies: bounded while they are read, JSON only."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from engines.openai import InvalidRequest
from gateway.config import GatewayConfig


async def read_body(request: Request, config: GatewayConfig) -> bytes:
    """The whole body.

    Raises:
        InvalidRequest: 408, 413 or 415. Nothing beyond the limit is ever held in memory.
    """
    _check_encoding(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > config.max_body_bytes:
        raise _too_large(config)
    pieces: list[bytes] = []
    nbytes = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for piece in request.stream():
                nbytes += len(piece)
                if nbytes > config.max_body_bytes:
                    raise _too_large(config)
                pieces.append(piece)
    except TimeoutError:
        raise InvalidRequest("The request's body took too long to arrive.", status=408) from None
    return b"".join(pieces)


def _check_encoding(request: Request) -> None:
    """Only what a page of a foreign origin cannot send without asking first is taken."""
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


def _too_large(config: GatewayConfig) -> InvalidRequest:
    limit = config.max_body_bytes
    return InvalidRequest(
        f"The request's body is larger than {limit} bytes.", code="body_too_large", status=413
    )
