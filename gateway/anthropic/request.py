"""The fields of Anthropic's request, with their bounds.

Unknown fields are ignored, so that newer clients keep working. Fields that ask for something this
server cannot do are refused by name. Content blocks stay plain JSON here, since there are many
kinds and more to come; ``conversation`` reads the fields that it knows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from engines.openai.errors import FieldError
from engines.openai.requests import Json, ModelName, StopList, TokenLimit

Sureness = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Blocks = Annotated[list[Json], msgspec.Meta(max_length=8192)]
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class AnthropicTurn(msgspec.Struct, frozen=True):
    """One entry of ``messages``."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Thinking(msgspec.Struct, frozen=True):
    """The field ``thinking``: whether the model thinks first, and if its thoughts are shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # accepted and ignored: engines have no such bound
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "tool" and not self.name:
            raise FieldError("name", "a choice of type tool names the tool")


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CacheControl(msgspec.Struct, frozen=True):
    """The field ``cache_control``: asks to keep the prompt up to this place for ``ttl``."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Diagnostics(msgspec.Struct, frozen=True):
    """The field ``diagnostics``: asks what changed in the prompt since an earlier request.

    ``previous_message_id`` is the id of the answer to that request; None if there was none.
    """

    previous_message_id: str | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/messages/count_tokens: all fields that make up a prompt."""

    model: ModelName
    messages: Annotated[list[AnthropicTurn], msgspec.Meta(min_length=1, max_length=100_000)]
    system: str | Blocks | None = None
    tools: Annotated[list[Json], msgspec.Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the beta's name of ``output_config.format``
    cache_control: CacheControl | None = None
    mcp_servers: Any = None  # servers whose tools Anthropic would call; left out here
    container: Any = None  # where Anthropic would run code; left out here


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of /v1/messages.

    Accepted and ignored, since they cannot change the answer here: ``metadata``, ``service_tier``,
    ``inference_geo``, ``speed``, ``context_management``, ``user_profile_id``, ``workspace_id``.
    """

    max_tokens: TokenLimit  # 0: only read the prompt, and keep it
    stop_sequences: StopList | None = None
    temperature: Sureness | None = None
    top_p: Sureness | None = None
    top_k: Count | None = None
    stream: bool | None = None
    diagnostics: Diagnostics | None = None

    def __post_init__(self) -> None:
        if self.max_tokens and self.messages[-1].role == "assistant":
            raise FieldError(
                "messages",
                "this server cannot continue a prefilled answer: end with a user message",
            )
