"""Translates a whole request for a message into a chat, and names the shape of its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from engines.base import EngineUnavailable
from engines.openai.errors import InvalidRequest
from engines.openai.messages import NO_IMAGES, ImageSupport
from engines.openai.requests import NO_LIMIT, Json, checked
from gateway.anthropic.conversation import chat_messages
from gateway.anthropic.events import PING, MessageEvents
from gateway.anthropic.message import Asked, Ttl, whole_message
from gateway.anthropic.request import CountRequest, MessagesRequest, OutputFormat, ToolChoice
from gateway.errors import ANTHROPIC_PATH, Failure
from gateway.identity.names import seconds_of
from gateway.relay.answer import AnswerFormat
from gateway.turns import Translated
from gateway.watch.requests import Usage

# Fields of the same name and meaning in both dialects.
_SAME = ("model", "temperature", "top_p", "top_k", "metadata")


class MessageFormat(AnswerFormat):
    """The shape of one message, as an answer to one request."""

    def __init__(self, asked: Asked, streamed: bool, request_id: str | None = None) -> None:
        self.asked = asked
        self._request_id = request_id
        # Returns ``diagnostics``; called when the answer begins.
        self.diagnose: Callable[[], Json | None] = lambda: None
        self._streamed = streamed

    def events(self, prompt: Usage | None) -> MessageEvents:
        return MessageEvents(self.asked, self.diagnose(), prompt)

    def whole(self, body: bytes) -> bytes:
        try:
            return whole_message(self.asked, body, self.diagnose())
        except IndexError as error:
            raise EngineUnavailable("its answer cannot be read") from error

    def refusal(self, failure: Failure) -> Response:
        return failure.response_for(ANTHROPIC_PATH, self._request_id)

    def sign_of_life(self) -> bytes:
        return PING if self._streamed else b""


def translated(
    raw: Json,
    image_support: ImageSupport = NO_IMAGES,
    request_id: str | None = None,
) -> Translated:
    """Translate the body of /v1/messages into a chat; error answers will name ``request_id``.

    Raises:
        InvalidRequest: the body cannot be served as it stands; the message names the field.
    """
    request = checked(raw, MessagesRequest)
    chat, left_out = prompt_fields(request, image_support)
    chat |= {name: raw[name] for name in _SAME if raw.get(name) is not None}
    # vLLM refuses 0 tokens, so one is asked for, and not shown to the client.
    chat["max_tokens"] = request.max_tokens or 1
    if request.stop_sequences:
        chat["stop"] = request.stop_sequences
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = MessageFormat(_asked(request), bool(request.stream), request_id)
    retain_s = seconds_of(answer.asked.ttl)
    return Translated(chat, answer, dropped=left_out, retain_s=retain_s)


def prompt_fields(request: CountRequest, image_support: ImageSupport) -> tuple[Json, list[str]]:
    """Return the chat's fields that make up its prompt, and metrics' labels of parts left out."""
    chat = chat_messages(request, image_support)
    tools, num_left_out = chat_tools(request)
    fields: Json = {"messages": chat.messages, **_thinking(request)}
    if tools:
        fields["tools"] = tools
    fields |= chat_tool_choice(request.tool_choice, tools)
    if form := _output_format(request):
        schema = {"name": "answer", "schema": form.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    # These only serve tools that Anthropic's servers run, and such tools are left out.
    servers = {"container": request.container, "mcp_servers": request.mcp_servers}
    unused = [name for name, value in servers.items() if value]
    return fields, [*chat.left_out, *["tool"] * num_left_out, *unused]


def _output_format(request: CountRequest) -> OutputFormat | None:
    form = request.output_config.format if request.output_config else None
    if form is not None and request.output_format is not None:
        raise InvalidRequest(
            "output_format: this is an older name of output_config.format; send only one of them",
            "output_format",
        )
    return form or request.output_format


def _thinking(request: CountRequest) -> Json:
    """Return the chat's fields that say how much the model is to think; {} if nothing does."""
    fields: Json = {}
    effort = request.output_config.effort if request.output_config else None
    if request.thinking is not None and request.thinking.type == "disabled":
        return {"chat_template_kwargs": {"enable_thinking": False}}
    if request.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields


def _asked(request: MessagesRequest) -> Asked:
    omitted = request.thinking is not None and request.thinking.display == "omitted"
    return Asked(
        message_id=f"msg_{secrets.token_hex(12)}",
        model=request.model,
        max_tokens=None if request.max_tokens == NO_LIMIT else request.max_tokens,
        shows_thoughts=not omitted,
        ttl=asked_ttl(request),
        previous_id=request.diagnostics.previous_message_id if request.diagnostics else None,
    )


def asked_ttl(request: CountRequest) -> Ttl | None:
    """Return the longest ``ttl`` of all ``cache_control`` fields; None if there are none.

    The request itself, tools, and blocks of the system text and of messages may have one.
    """
    found: list[Any] = [request.cache_control and msgspec.to_builtins(request.cache_control)]
    found += [tool.get("cache_control") for tool in request.tools or ()]
    for content in (request.system, *(turn.content for turn in request.messages)):
        if isinstance(content, list):
            found += [block.get("cache_control") for block in content]
    ttls = [x.get("ttl") for x in found if isinstance(x, dict)]
    if not ttls:
        return None
    return "1h" if "1h" in ttls else "5m"


def chat_tools(request: CountRequest) -> tuple[list[Json], int]:
    """Return the tools of a chat, and how many were left out, which only Anthropic can run.

    Raises:
        InvalidRequest: a tool has no usable name or schema.
    """
    tools = request.tools or []
    ours = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools) if _is_the_clients(tool)]
    return ours, len(tools) - len(ours)


def _is_the_clients(tool: Json) -> bool:
    return tool.get("type") in (None, "custom")


def _tool(tool: Json, where: str) -> Json:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise InvalidRequest(f"{where}: a tool needs a name and an input_schema", where)
    function: Json = {"name": name, "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def chat_tool_choice(choice: ToolChoice | None, tools: list[Json]) -> Json:
    """Return the fields of a chat that say which tools may or must be called.

    Raises:
        InvalidRequest: ``choice`` requires a call, and there are no tools.
    """
    if choice is None:
        return {}
    if not tools:
        if choice.type in ("any", "tool"):
            raise InvalidRequest("tool_choice: there are no tools to call.", "tools")
        return {}
    fields: Json = {"tool_choice": _CHOICES.get(choice.type)}
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
