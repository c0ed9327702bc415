"""OpenAI's error shape, and the one exception that becomes it.

Gateway and engine processes answer every failure alike, so the shape is kept here. All four keys
are always present; ``param`` and ``code`` may be null.
"""

from __future__ import annotations

from typing import Any

# The ``type`` of an error with this HTTP status.
ERROR_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class InvalidRequest(Exception):
    """The client's request cannot be served; the message says what to change."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """Return the JSON object that the client gets."""
        return error_body(self.message, error_type(self.status), self.param, self.code)


class FieldError(ValueError):
    """A field's value is not accepted; the code that catches it adds the path to the struct."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def error_type(status: int) -> str:
    """Return OpenAI's ``type`` of an error with this HTTP status."""
    return ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(
    message: str, type: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the JSON object of a failed request, or of a failed stream's last event."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def context_too_long(
    max_context: int, prompt_tokens: int, param: str, *, at_least: bool = False
) -> InvalidRequest:
    """Return the error of a prompt that is too long.

    ``at_least``: the prompt has ``prompt_tokens`` or more, since counting ended early.
    """
    number = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    return InvalidRequest(
        f"This model's maximum context length is {max_context} tokens, but the prompt has "
        f"{number} tokens and an answer needs at least one more. Shorten the prompt.",
        param,
        "context_length_exceeded",
    )


def unknown_model(model: str, *served: str) -> InvalidRequest:
    """Return the error for a model that is not among those served (status 404)."""
    there = ", ".join(map(repr, served))
    return InvalidRequest(
        f"The model {model!r} does not exist here; this server has {there}.",
        "model",
        "model_not_found",
        404,
    )
