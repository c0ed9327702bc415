"""Plans how functions are offered to this model, and how its calls are read.

Tools work with every model:

- A chat template that supports tools gets them. For others, the system message gets
  ``DESCRIPTION``, and earlier calls and their results are written as plain text.
- With ``tool_choice`` auto, mlx_lm's parser for the model reads its calls. If there is none, an
  answer that is nothing but JSON ``{"name": ..., "arguments": {...}}`` (or a list of these) is a
  call.
- With ``tool_choice`` required, or naming a function, a grammar enforces
  ``{"name": NAME, "arguments": ARGUMENTS}`` where ARGUMENTS obeys the function's schema. It allows
  one call, or, if ``parallel_tool_calls`` is explicitly true, up to eight, one per line.
- With ``response_format`` and auto together, the grammar allows either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engines.host.grammar import GrammarWish, wish_for
from engines.mlx_worker.answer.tool_calls import (
    BareCalls,
    CallReader,
    LineCalls,
    MarkedCalls,
)
from engines.mlx_worker.model.loading import Vocabulary
from engines.openai.messages import Message, NamedTool, Tool
from engines.openai.requests import ChatRequest

ChatMessage: TypeAlias = dict[str, Any]

DESCRIPTION = """You can call these functions:
{functions}
To call a function, answer with nothing but a JSON object of this form:
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
Otherwise answer as usual."""


@dataclass(frozen=True)
class ToolPlan:
    """The way a request's tools are written into the prompt, and its calls are read."""

    tools: Sequence[ChatMessage]  # as the client sent them, for the chat template
    reader: Callable[[], CallReader | None]  # makes one per answer; None: all text is content
    marked: bool = False  # calls are written between the model's own markers


def grammar_wanted(request: ChatRequest) -> GrammarWish | None:
    """Return the grammar that a request's answer must obey; None if it may be any text.

    Raises:
        InvalidRequest: the request asks for a form that this engine cannot enforce.
    """
    wish = wish_for(request.response_format, request.structured_outputs)
    many = request.parallel_tool_calls is True
    if request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool):
        return GrammarWish(_offered(request), many, None)
    return None if wish is None else wish._replace(tools=_offered(request), many=many)


def plan_tools(request: ChatRequest, vocabulary: Vocabulary, held: bool = False) -> ToolPlan:
    """Return the plan of a request's tools; ``held``: a grammar constrains its answer."""
    tokenizer, tools = vocabulary.tokenizer, _offered(request)
    names = [tool.function.name for tool in tools]
    shown = [_plain(tool) for tool in request.tools or ()]
    if not tools:
        return ToolPlan(shown, lambda: None)
    if held:
        return ToolPlan(shown, partial(LineCalls, names))
    if not tokenizer.has_tool_calling:
        return ToolPlan(shown, partial(BareCalls, names))
    markers = (tokenizer.tool_call_start, tokenizer.tool_call_end)
    return ToolPlan(shown, partial(MarkedCalls, tokenizer.tool_parser, shown, markers), marked=True)


def _offered(request: ChatRequest) -> list[Tool]:
    """Return the functions that this answer may call."""
    tools = list(request.tools or ())
    if request.tool_choice == "none":
        return []
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        return [tool for tool in tools if tool.function.name == name]
    return tools


def _plain(tool: Tool) -> ChatMessage:
    function = {k: v for k, v in msgspec.to_builtins(tool.function).items() if v is not None}
    return {"type": "function", "function": function}


def template_knows_tools(tokenizer: TokenizerWrapper) -> bool:
    """Return whether the model's chat template mentions tools."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return tokenizer.has_tool_calling or any("tools" in text for text in texts)


def template_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return messages in the form that chat templates with tools expect."""
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> ChatMessage:
    roles = {"developer": "system", "function": "tool"}
    shown: ChatMessage = {
        "role": roles.get(message.role, message.role),
        "content": message.text,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.thought,
    }
    if calls := _calls(message):
        shown["tool_calls"] = calls
    return {key: value for key, value in shown.items() if value is not None}


def _calls(message: Message) -> list[ChatMessage]:
    calls = [(x.id, x.function) for x in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(("", message.function_call))
    return [
        {
            "id": id_,
            "type": "function",
            "function": {"name": called.name, "arguments": _arguments(called.arguments)},
        }
        for id_, called in calls
    ]


def _arguments(text: str) -> Any:
    """Return a call's arguments as the object that templates expect, or as text if not JSON."""
    try:
        return msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text


def plain_messages(messages: Sequence[Message], tools: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages for templates without tools: calls and results become text."""
    names = {x.id: x.function.name for m in messages for x in m.tool_calls or ()}
    shown = [_plain_message(x, names) for x in template_messages(messages)]
    if not tools:
        return shown
    functions = "\n".join(json.dumps(x["function"], ensure_ascii=False) for x in tools)
    text = DESCRIPTION.format(functions=functions)
    if shown[0]["role"] != "system":
        return [{"role": "system", "content": text}, *shown]
    return [{**shown[0], "content": f"{shown[0]['content']}\n\n{text}"}, *shown[1:]]


def _plain_message(shown: ChatMessage, names: dict[str, str]) -> ChatMessage:
    if shown["role"] == "tool":
        name = shown.get("name") or names.get(shown.get("tool_call_id", ""), "the function")
        return {"role": "user", "content": f"Result of {name}: {shown['content']}"}
    if calls := shown.pop("tool_calls", None):
        lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        shown["content"] = "\n".join(x for x in (shown["content"], *lines) if x)
    return shown
