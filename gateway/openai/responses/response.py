"""The request for a response: its fields, and the response object that repeats them."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec

from engines.openai.errors import FieldError
from engines.openai.messages import Json, JsonSchema
from engines.openai.requests import NO_LIMIT, ModelName, TokenLimit
from gateway.errors import Failure
from gateway.openai.responses.output import new_id
from gateway.openai.stored_objects import Metadata
from gateway.watch.requests import Usage

MAX_ITEMS = 4096
Items = Annotated[list[Json], msgspec.Meta(max_length=MAX_ITEMS)]
ShortText = Annotated[str, msgspec.Meta(max_length=1024)]
Status = Literal["in_progress", "completed", "incomplete", "failed"]
# The engine's ``finish_reason`` of an answer that ended early, and the reason in responses.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class TextFormat(msgspec.Struct, frozen=True):
    """The wanted form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "response"
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.schema is None:
            raise FieldError("schema", "type json_schema needs schema")

    def for_chat(self) -> Json | None:
        """Return the chat's ``response_format``; None for plain text."""
        if self.type != "json_schema":
            return None if self.type == "text" else {"type": self.type}
        schema = JsonSchema(self.name, self.schema, self.description, self.strict)
        return {"type": self.type, "json_schema": msgspec.to_builtins(schema)}


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class CacheOptions(msgspec.Struct, frozen=True):
    """The client's wish for how long to keep its prompt; see ``names.asked_seconds``."""

    mode: str = "implicit"
    ttl: str = "30m"


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/responses.

    Sampling fields have the same names as in a chat, whose validation checks them. Unknown fields,
    and fields that cannot change this server's answer (``service_tier``, ``truncation``,
    ``context_management`` ...), are accepted and ignored.
    """

    model: ModelName
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    conversation: ShortText | Json | None = None
    tools: Annotated[list[Json], msgspec.Meta(max_length=512)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenLimit | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    prompt: Json | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if self.background:
            raise FieldError("background", "background responses are not supported: leave it out")
        if self.prompt is not None:
            raise FieldError("prompt", "prompt templates are not supported: send their text")
        if self.previous_response_id and self.conversation:
            raise FieldError("conversation", "send conversation or previous_response_id, not both")

    @property
    def answer_tokens(self) -> int | None:
        """The limit of the answer's tokens; None = as many as the context allows."""
        return None if self.max_output_tokens == NO_LIMIT else self.max_output_tokens

    @property
    def stores(self) -> bool:
        """True if the response is to be stored, which is the default."""
        return self.store is not False

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the response belongs to; None if to none."""
        if isinstance(self.conversation, dict):
            found = self.conversation.get("id")
            return found if isinstance(found, str) else None
        return self.conversation

    @property
    def items(self) -> list[Json]:
        """The input as items; a string becomes one message of the user."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input or ())

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


class Draft:
    """The response object, from its beginning to its end, under a new id."""

    def __init__(self, fields: ResponseFields, stores: bool = False) -> None:
        self.id = new_id("resp")
        self._echo: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": fields.model,
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": fields.answer_tokens,
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
        """Return the object as JSON. ``reason``: why it is incomplete; None if it is not."""
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
        """Return the object of an answer that the engine ended with ``finish_reason``."""
        reason = _INCOMPLETE.get(finish_reason)
        return self.shown("incomplete" if reason else "completed", output, usage, reason=reason)


def cut_short(finish_reason: str) -> bool:
    """Return whether an answer was ended before the model ended it."""
    return finish_reason in _INCOMPLETE


def shown_usage(usage: Usage) -> Json:
    """Return token counts in the form of responses, with all details."""
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
    """Return a failure as the ``error`` of a response, which has only three codes."""
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
    """Encode fields that may be large: as objects they would take many times the memory."""
    return msgspec.Raw(msgspec.json.encode(echo))


def _tool(tool: Json) -> Json:
    """Return a tool as the response repeats it; a function's missing fields are null."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}
