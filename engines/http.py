"""HTTP between clients, gateway and engines: headers, bounded bodies, tokens, disconnects.

Each of our headers is written and read here. Only the gateway may set request headers: three name
the session, and one limits how long the request may wait. vLLM gets the session in fields of the
body instead. Response headers state where the KV of the prompt came from, which is passed on to
the client, and the prompt's length.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.openai.errors import InvalidRequest
from kvstore.session import SessionRef, TierName

TENANT_HEADER: Final = "x-thermocline-tenant"
SESSION_HEADER: Final = "x-thermocline-session"  # percent-encoded UTF-8
SALT_HEADER: Final = "x-thermocline-salt"  # hex
PATIENCE_HEADER: Final = "x-thermocline-patience"  # seconds, see ``patience_header``
CACHE_HEADER: Final = "x-thermocline-cache"  # see ``CacheOutcome``
PROMPT_HEADER: Final = "x-thermocline-prompt"  # tokens of the prompt; for the gateway only

CacheSource: TypeAlias = Literal["hot", "cold-ram", "cold-disk", "cold-redis", "miss"]
# The source that is reported for each tier.
COLD_SOURCES: Final[Mapping[TierName, CacheSource]] = {
    "ram": "cold-ram",
    "disk": "cold-disk",
    "redis": "cold-redis",
}
_OUTCOME: Final = re.compile(
    r"(?P<source>hot|cold-(?:ram|disk|redis)|miss)"
    r"(?:; tokens=(?P<tokens>\d{1,18}))?(?:; reason=(?P<reason>[a-z-]+))?"
)
PARAMS_FIELD: Final = "thermocline"
T = TypeVar("T")


@dataclass(frozen=True)
class CacheOutcome:
    """The source of the KV that a prompt reused, and the reason why no more could be reused.

    ``reason`` is one of ``kvstore.session.MissReason``; None if nothing was missed.
    """

    source: CacheSource
    cached_tokens: int
    reason: str | None = None

    def header(self) -> str:
        """Return the value of ``CACHE_HEADER``, as in ``cold-ram; tokens=7; reason=diverged``."""
        text = f"{self.source}; tokens={self.cached_tokens}"
        return f"{text}; reason={self.reason}" if self.reason else text

    @classmethod
    def parse(cls, text: str) -> CacheOutcome | None:
        """Parse a value of ``CACHE_HEADER``; None if it is empty or malformed."""
        found = _OUTCOME.fullmatch(text)
        if found is None:
            return None
        source = cast(CacheSource, found["source"])
        return cls(source, int(found["tokens"] or 0), found["reason"])


def session_headers(session: SessionRef) -> dict[str, str]:
    """Return the request headers that name a turn's session to an engine."""
    return {
        TENANT_HEADER: session.tenant,
        SESSION_HEADER: quote(session.id, safe=""),
        SALT_HEADER: session.salt.hex(),
    }


def session_from(headers: Mapping[str, str]) -> SessionRef | None:
    """Read what ``session_headers`` wrote; None for a request that belongs to no session.

    Args:
        headers: of the request; their names are looked up in lower case.

    Raises:
        InvalidRequest: the salt is not hexadecimal.
    """
    session_id = unquote(headers.get(SESSION_HEADER, ""))
    if not session_id:
        return None
    try:
        salt = bytes.fromhex(headers.get(SALT_HEADER, ""))
    except ValueError as error:
        raise InvalidRequest(f"The header {SALT_HEADER} is not hexadecimal.") from error
    return SessionRef(headers.get(TENANT_HEADER, ""), session_id, salt)


def patience_header(seconds: float) -> dict[str, str]:
    """Return the request header that limits how long a turn may wait in the engine's own queue."""
    return {PATIENCE_HEADER: f"{max(0.0, seconds):.3f}"}


def patience_from(headers: Mapping[str, str]) -> float | None:
    """Read what ``patience_header`` wrote, in seconds; None if there is no such header.

    Raises:
        InvalidRequest: the value is not a number.
    """
    said = headers.get(PATIENCE_HEADER)
    if said is None:
        return None
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", said):
        raise InvalidRequest(f"The header {PATIENCE_HEADER} is not a number of seconds.")
    return float(said)


def with_session(body: Mapping[str, object], session: SessionRef) -> dict[str, object]:
    """Return the client's body with our tenant and session, which replace any the client set."""
    names = {"tenant": session.tenant, "session": session.id}
    return {**body, "cache_salt": session.salt.hex(), "kv_transfer_params": {PARAMS_FIELD: names}}


class BearerGate:
    """ASGI middleware that admits requests with the bearer token, compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            message = "The bearer token is missing or wrong: an engine answers its gateway only."
            refusal = InvalidRequest(message, code="invalid_api_key", status=401)
            answer = JSONResponse(refusal.body(), 401, {"www-authenticate": "Bearer"})
            await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and compare_digest(given[0], self._expected)


class ClientGone(Exception):
    """The client has closed the connection, or no longer reads from it."""


async def read_body(
    request: Request, max_bytes: int, on_size: Callable[[int], None] = lambda nbytes: None
) -> bytes:
    """Read and return the whole body, never holding more than ``max_bytes`` in memory.

    Args:
        on_size: called with the number of bytes read so far; an exception from it ends the reading.

    Raises:
        InvalidRequest: the body is larger than ``max_bytes`` (status 413).
        starlette.requests.ClientDisconnect: the client left before the body was whole.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise body_too_large(max_bytes)
    chunks: list[bytes] = []
    nbytes = 0
    async for chunk in request.stream():
        nbytes += len(chunk)
        if nbytes > max_bytes:
            raise body_too_large(max_bytes)
        on_size(nbytes)
        chunks.append(chunk)
    return b"".join(chunks)


def body_too_large(max_bytes: int) -> InvalidRequest:
    """Return the error for a body of more than ``max_bytes`` (status 413)."""
    return InvalidRequest(
        f"The request's body is larger than {max_bytes} bytes.", code="body_too_large", status=413
    )


async def while_client_stays(receive: Receive, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` and return its result, but cancel it as soon as the client disconnects.

    The request's body must have been read. ``work`` must not end the response, since ``receive``
    then reports a disconnect. ``work`` runs in a task of its own because resuming a coroutine costs
    time for every frame that awaits it, and a route's handler has twenty such frames above it.

    Raises:
        ClientGone: the client disconnected. ``work`` has ended by then.
    """
    working = asyncio.create_task(work())
    watching = asyncio.create_task(_cancel_when_gone(receive, working))
    try:
        return await working
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if this is not None and this.cancelling():
            raise
        raise ClientGone from None
    finally:
        watching.cancel()


async def _cancel_when_gone(receive: Receive, working: asyncio.Task[T]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    working.cancel()
