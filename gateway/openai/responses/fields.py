"""The fields of a request for a response, as far as a chat does not check them anyway."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from engines.openai.errors import FieldError
from engines.openai.messages import Json, JsonSchema
from engines.openai.requests import ModelName, TokenLimit
from gateway.openai.stored_objects import Metadata

MAX_ITEMS = 4096
Items = Annotated[list[Json], msgspec.Meta(max_length=MAX_ITEMS)]
ShortText = Annotated[str, msgspec.Meta(max_length=1024)]


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
        """Write it as a chat's ``response_format``; None for plain text."""
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
    """A wish how long a prompt is kept; our sessions are kept as budgets allow."""

    mode: str = "implicit"
    ttl: str = "30m"


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/responses.

    Sampling fields have a chat's names and are checked there. Unknown fields, and
    fields that cannot change this server's answer (``service_tier``, ``truncation``,
    ``context_management`` ...), are taken and left alone.
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
            raise FieldError("background", "background responses are not made here: leave it out")
        if self.prompt is not None:
            raise FieldError("prompt", "no prompt templates are stored here: send their text")
        if self.previous_response_id and self.conversation:
            raise FieldError("conversation", "send conversation or previous_response_id, not both")

    @property
    def stores(self) -> bool:
        """Say whether the response is to be stored; so it is unless the client says no."""
        return self.store is not False

    @property
    def conversation_id(self) -> str | None:
        """The conversation that it belongs to, None if to none."""
        if isinstance(self.conversation, dict):
            found = self.conversation.get("id")
            return found if isinstance(found, str) else None
        return self.conversation

    @property
    def items(self) -> list[Json]:
        """The input as items; a string is one message of the user."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input or ())

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
