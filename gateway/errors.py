"""Turns every failure into the shape of its dialect, with a status and headers to act on.

OpenAI's is the rule; what is asked under ``/v1/messages`` is answered in Anthropic's, wherever the
fault is found: by the host's check, the router, the key, the body's reader.
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
# Anthropic's types by status; any other is one of the server's own faults, or of the request's.
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
# What engines say of a prompt beyond the context: ours (``context_too_long``), and vLLM.
_CONTEXT: Final = re.compile(r"maximum context length is (\d{1,18}) tokens")
_PROMPT: Final = re.compile(
    r"(?:prompt has|text has|prompt contains) (?:at least )?(\d{1,18}) (?:input )?tokens"
)
_OF_A_TOOL: Final = re.compile(r"^(tools\[\d{1,4}\])\.function\.parameters")  # a chat's name of it
_OVERLOADED: Final = 529  # Anthropic's status for 503
_HINTS = {
    404: "This path does not exist here; see /v1/models, /v1/chat/completions, /v1/responses,"
    " /v1/completions, /v1/messages and /v1/sessions.",
    405: "This path does not take that method.",
}
# Reasons why a session was not put to sleep: a code for programs, and words. One that is being
# saved sleeps when that is done.
_KEPT: Final[Mapping[KeptReason, tuple[str, str]]] = {
    "busy": ("session_busy", "a turn of it is being served"),
    "pinned": ("session_pinned", "it is pinned; unpin it first"),
    "no-cold-copy": ("no_cold_copy", "it could not be saved, so it would be lost"),
    "disabled": ("hibernation_disabled", "this engine serves without hibernation"),
    "no-room": ("tier_refused", "that tier did not take all of it"),
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
        """The body, in OpenAI's shape."""
        body = error_body(self.message, error_type(self.status), self.param, self.code)
        return msgspec.json.encode(body)

    def event(self) -> bytes:
        """The last bytes of a stream that failed after its head was sent."""
        return b"data: " + self.json() + b"\n\ndata: [DONE]\n\n"

    def anthropic_json(self, request_id: str | None = None) -> bytes:
        """The body, in Anthropic's shape."""
        message = _OF_A_TOOL.sub(r"\1.input_schema", self.message)
        if self.code == "context_length_exceeded":
            message = _too_long(message)
        error = {"type": self._anthropic_type, "message": message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def anthropic_event(self) -> bytes:
        """The last event of one of Anthropic's streams that failed after its head was sent."""
        return b"event: error\ndata: " + self.anthropic_json() + b"\n\n"

    @property
    def _anthropic_type(self) -> str:
        rest = "api_error" if self._anthropic_status >= 500 else "invalid_request_error"
        return _ANTHROPIC_TYPES.get(self._anthropic_status, rest)

    @property
    def _anthropic_status(self) -> int:
        return _OVERLOADED if self.status == HTTPStatus.SERVICE_UNAVAILABLE else self.status

    def response_for(self, path: str, request_id: str | None = None) -> Response:
        """The whole response in the dialect that is spoken at ``path``."""
        if path != ANTHROPIC_PATH and not path.startswith(f"{ANTHROPIC_PATH}/"):
            return self.response()
        body = self.anthropic_json(request_id)
        return Response(body, self._anthropic_status, self._headers(), "application/json")

    def response(self) -> Response:
        """The whole response in OpenAI's shape."""
        return Response(self.json(), self.status, self._headers(), "application/json")

    def _headers(self) -> dict[str, str]:
        """``retry-after`` where the same request may succeed later, and how to send a key."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, ceil(self.retry_after_s * 1000)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers


def _too_long(message: str) -> str:
    """Put Anthropic's words in front, by which agents know that and how far they have to compact.

    An engine that did not count to the end says "at least", perhaps of a number within the context.
    """
    most, counted = _CONTEXT.search(message), _PROMPT.search(message)
    if most is None:
        return f"prompt is too long: {message}"
    number = max(int(counted[1]) if counted else 0, int(most[1]) + 1)
    return f"prompt is too long: {number} tokens > {most[1]} maximum. {message}"


class RequestRefused(Exception):
    """A part of the gateway refuses a request, and has the answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: Exception) -> Failure:
    """Translate an exception. An unforeseen one becomes a 500 without details."""
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
                message = "There is no room to store this. Delete what is not needed any more."
                return Failure(507, message, None, "store_full")
            message = "What is stored cannot be reached now. Try again later."
            return Failure(503, message, None, "store_unavailable", RETRY_LATER_S)
        case TimeoutError():
            return Failure(504, "The answer took too long.", None, "timeout")
        case HTTPException():
            status = error.status_code
            return Failure(status, _HINTS.get(status, str(error.detail)), None, _code(status))
        case _:
            return Failure(500, "This server made an error; its log says more.", None, "internal")


async def respond(request: Request, error: Exception) -> Response:
    """Answer an exception that ``failure_of`` knows by name; an exception handler of the app."""
    request_id = getattr(request.scope.get("state", {}).get("request"), "id", None)
    response = failure_of(error).response_for(request.url.path, request_id)
    if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """List the methods that a path takes: each has a route of its own."""
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
