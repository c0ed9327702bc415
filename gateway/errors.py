"""Turns every failure into an error of the request's dialect, with its status and headers.

Paths under ``/v1/messages`` get Anthropic's shape and all others OpenAI's, whichever part finds the
fault: the check of the host, the router, the check of the key, the reader of the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from math import ceil
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from engines.base import EngineError, EngineStalled, EngineUnavailable, KeptReason
from engines.openai.requests import InvalidRequest, error_body, error_type
from gateway.stored.table import StoreFailed
from scheduler.sessions import Draining, MemoryScarce, Overloaded, SessionKept

RETRY_LATER_S = 2.0  # an engine that crashed is usually back by then
ANTHROPIC_PATH: Final = "/v1/messages"
# Anthropic's types by status; any other is "api_error" from 500 on, else "invalid_request_error".
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# How engines report a prompt that exceeds the context: ours (``context_too_long``), and vLLM.
_CONTEXT: Final = re.compile(r"maximum context length is (\d{1,18}) tokens")
_PROMPT: Final = re.compile(
    r"(?:prompt has|text has|prompt contains) (?:at least )?(\d{1,18}) (?:input )?tokens"
)
_OF_A_TOOL: Final = re.compile(r"^(tools\[\d{1,4}\])\.function\.parameters")  # its path in a chat
_OVERLOADED: Final = 529  # Anthropic's status for 503
_HINTS = {
    404: "This path does not exist here; see /v1/models, /v1/chat/completions, /v1/responses,"
    " /v1/completions, /v1/messages and /v1/sessions.",
    405: "This path does not take that method.",
}
# Reasons why a session was not put to sleep: a code for programs, and words for people.
_KEPT: Final[Mapping[KeptReason, tuple[str, str]]] = {
    "busy": ("session_busy", "it is serving a turn"),
    "pinned": ("session_pinned", "it is pinned; unpin it first"),
    "no-cold-copy": ("no_cold_copy", "it could not be saved, so it would be lost"),
    "disabled": ("hibernation_disabled", "this engine serves without hibernation"),
    "no-room": (
        "tier_refused",
        "that tier is off or did not take all of it, or a session that begins the same keeps it",
    ),
}


class Failure(msgspec.Struct, frozen=True):
    """The answer to a request that failed."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def json(self) -> bytes:
        """Return the body, in OpenAI's shape."""
        body = error_body(self.message, error_type(self.status), self.param, self.code)
        return msgspec.json.encode(body)

    def event(self) -> bytes:
        """Return the last bytes of a stream that failed after its head was sent."""
        return b"data: " + self.json() + b"\n\ndata: [DONE]\n\n"

    def anthropic_json(self, request_id: str | None = None) -> bytes:
        """Return the body, in Anthropic's shape."""
        message = _OF_A_TOOL.sub(r"\1.input_schema", self.message)
        if self.code == "context_length_exceeded":
            message = _too_long(message)
        error = {"type": self._anthropic_type, "message": message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def anthropic_event(self) -> bytes:
        """Return the last event of an Anthropic stream that failed after its head was sent."""
        return b"event: error\ndata: " + self.anthropic_json() + b"\n\n"

    @property
    def _anthropic_type(self) -> str:
        rest = "api_error" if self._anthropic_status >= 500 else "invalid_request_error"
        return _ANTHROPIC_TYPES.get(self._anthropic_status, rest)

    @property
    def _anthropic_status(self) -> int:
        return _OVERLOADED if self.status == HTTPStatus.SERVICE_UNAVAILABLE else self.status

    def response_for(self, path: str, request_id: str | None = None) -> Response:
        """Return the whole response, in the dialect of ``path``."""
        if path != ANTHROPIC_PATH and not path.startswith(f"{ANTHROPIC_PATH}/"):
            return self.response()
        body = self.anthropic_json(request_id)
        return Response(body, self._anthropic_status, self._headers(), "application/json")

    def response(self) -> Response:
        """Return the whole response, in OpenAI's shape."""
        return Response(self.json(), self.status, self._headers(), "application/json")

    def _headers(self) -> dict[str, str]:
        """Return ``retry-after`` if a retry may succeed, and how to authenticate for a 401."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, ceil(self.retry_after_s * 1000)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers


def _too_long(message: str) -> str:
    """Put Anthropic's sentence in front, from which agents read how much they have to compact.

    An engine that stopped counting reports "at least N", where N may be within the context: then
    the smallest number beyond the context is given.
    """
    most, counted = _CONTEXT.search(message), _PROMPT.search(message)
    if most is None:
        return f"prompt is too long: {message}"
    number = max(int(counted[1]) if counted else 0, int(most[1]) + 1)
    return f"prompt is too long: {number} tokens > {most[1]} maximum. {message}"


class RequestRefused(Exception):
    """Raised by a part of the gateway that refuses a request; carries the answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: Exception) -> Failure:
    """Return the answer to an exception; an unforeseen one gives a 500 without details."""
    match error:
        case RequestRefused():
            return error.failure
        case InvalidRequest():
            return Failure(error.status, error.message, error.param, error.code)
        case MemoryScarce():
            message = f"This server takes no new turns: {error}. Try again later."
            return Failure(503, message, None, "memory_scarce", error.retry_after_s)
        case Overloaded():
            message = f"This server is busy: {error}. Try again later."
            return Failure(429, message, None, "rate_limit_exceeded", error.retry_after_s)
        case Draining():
            message = "This server is shutting down. Try again."
            return Failure(503, message, None, "draining", RETRY_LATER_S)
        case EngineStalled():
            return Failure(504, f"The engine does not answer: {error}.", None, "engine_stalled")
        case EngineUnavailable():
            message = f"The engine is not available: {error}. Try again later."
            return Failure(503, message, None, "engine_unavailable", RETRY_LATER_S)
        case SessionKept():
            code, why = _KEPT[error.reason]
            return Failure(409, f"This session stays as it is: {why}.", "session_id", code)
        case EngineError():
            return Failure(502, f"The engine refused: {error}.", None, "engine_refused")
        case StoreFailed():
            if error.trouble == "full":
                message = "There is no room to store this. Delete stored objects you do not need."
                return Failure(507, message, None, "store_full")
            message = "Stored objects cannot be reached now. Try again later."
            return Failure(503, message, None, "store_unavailable", RETRY_LATER_S)
        case TimeoutError():
            return Failure(504, "The answer took too long.", None, "timeout")
        case HTTPException():
            status = error.status_code
            return Failure(status, _HINTS.get(status, str(error.detail)), None, _code(status))
        case _:
            return Failure(500, "Internal server error; the log says more.", None, "internal")


async def respond(request: Request, error: Exception) -> Response:
    """Answer a request that raised one of ``FORESEEN``; the app's exception handler."""
    request_id = getattr(request.scope.get("state", {}).get("request"), "id", None)
    response = failure_of(error).response_for(request.url.path, request_id)
    if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """Return the methods that a request's path takes; each method has its own route."""
    routes: list[Route] = request.app.routes
    found = [x.methods for x in routes if x.matches(request.scope)[0] is not Match.NONE]
    return {method for methods in found for method in methods or ()} - {"HEAD"}


FORESEEN: tuple[type[Exception], ...] = (
    InvalidRequest,
    RequestRefused,
    SessionKept,
    Overloaded,
    Draining,
    EngineError,
    StoreFailed,
    TimeoutError,
    HTTPException,
)


def _code(status: int) -> str:
    return HTTPStatus(status).phrase.lower().replace(" ", "_")
