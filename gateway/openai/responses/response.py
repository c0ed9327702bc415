"""The response object: the request's fields, echoed, and the outcome."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.metrics import Usage
from gateway.openai.responses.fields import ResponseFields
from gateway.openai.responses.output import new_id

Status = Literal["in_progress", "completed", "incomplete", "failed"]
# The engine's word for why an answer ended early, and the one of responses.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Draft:
    """A response before, while and after it is made. Its id is new."""

    def __init__(self, fields: ResponseFields, stores: bool = False) -> None:
        self.id = new_id("resp")
        self._echo: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": fields.model,
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "conversation": {"id": fields.conversation_id} if fields.conversation_id else None,
            "prompt_cache_key": fields.prompt_cache_key,
            "prompt_cache_options": fields.prompt_cache_options,
            "prompt_cache_retention": fields.prompt_cache_retention,
            "reasoning": _reasoning(fields),
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": stores,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": _written(_text(fields)),
            "tool_choice": _written(fields.tool_choice or "auto"),
            "tools": _written([_tool(x) for x in fields.tools or ()]),
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": "disabled",
            "user": fields.user,
            "metadata": fields.metadata or {},
        }

    def shown(
        self,
        status: Status,
        output: list[Json] | None = None,
        usage: Usage | None = None,
        error: Json | None = None,
        reason: str | None = None,
    ) -> Json:
        """Make the object. ``reason`` says why it is incomplete."""
        ended = status in ("completed", "incomplete")
        return {
            **self._echo,
            "status": status,
            "completed_at": int(time.time()) if ended else None,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": output or [],
            "usage": shown_usage(usage) if usage else None,
        }

    def finished(self, output: list[Json], usage: Usage | None, finish_reason: str) -> Json:
        """Make the object of an answer that the engine ended with ``finish_reason``."""
        reason = _INCOMPLETE.get(finish_reason)
        return self.shown("incomplete" if reason else "completed", output, usage, reason=reason)


def cut_short(finish_reason: str) -> bool:
    """Say whether the engine ended an answer before the model did."""
    return finish_reason in _INCOMPLETE


def shown_usage(usage: Usage) -> Json:
    """Write token counts as responses do: all details are there."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.cache_written,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def shown_error(failure: Failure) -> Json:
    """Write a failure as a response's error, whose codes are few."""
    limited = failure.status == 429
    code = "rate_limit_exceeded" if limited else "server_error"
    return {"code": "invalid_prompt" if failure.status == 400 else code, "message": failure.message}


def _reasoning(fields: ResponseFields) -> Json:
    asked = fields.reasoning
    return {"effort": asked.effort if asked else None, "summary": None}


def _text(fields: ResponseFields) -> Json:
    asked = fields.text
    form: Json = {"type": "text"}
    if asked and asked.format:
        form = {k: v for k, v in msgspec.to_builtins(asked.format).items() if v is not None}
        if form["type"] != "json_schema":
            form = {"type": form["type"]}
    return {"format": form, "verbosity": (asked.verbosity if asked else None) or "medium"}


def _written(echo: object) -> msgspec.Raw:
    """Write what may be large: parsed, it would take many times as much during the turn."""
    return msgspec.Raw(msgspec.json.encode(echo))


def _tool(tool: Json) -> Json:
    """Echo a tool; of a function all fields are there."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}
