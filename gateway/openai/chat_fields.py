"""OpenAI's chat request, made into fields that engines know.

Deprecated ``functions`` become tools, custom tools functions, ``allowed_tools`` a shorter list.
What only OpenAI's own servers run (``web_search_options``) is left out and counted. All else goes
on untouched: ``metadata``, ``user``, ``service_tier``, ``verbosity``, ``prediction`` and their like
cannot change the answer here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from gateway.openai.stored_objects import Metadata
from gateway.openai.tools import custom_arguments, offer


class ChatCalls(NamedTuple):
    """The form in which the client knows calls: of one function, or of custom tools."""

    legacy: bool = False
    customs: frozenset[str] = frozenset()


def for_engine(asked: Json, skipped: list[str]) -> tuple[Json, ChatCalls]:
    """Make a body for engines; what is left out is added to ``skipped``.

    Raises:
        InvalidRequest: the tools or their choice cannot be read.
    """
    legacy = bool(asked.get("functions")) and not asked.get("tools")
    raw = {k: v for k, v in asked.items() if k not in ("functions", "function_call", "store")}
    if raw.pop("web_search_options", None) is not None:
        skipped.append("web_search")
    _check_moderation(raw.pop("moderation", None))
    if legacy:
        _take_functions(raw, asked)
    customs: frozenset[str] = frozenset()
    if _needs_offer(raw):
        offered = offer(raw.pop("tools"), raw.pop("tool_choice", None), nested=True)
        customs = offered.customs
        if offered.skipped:
            raise InvalidRequest("tools: use function or custom", "tools")
        if offered.tools:
            raw["tools"], raw["tool_choice"] = offered.tools, offered.choice or "auto"
    if isinstance(raw.get("messages"), list):
        raw["messages"] = _messages(raw["messages"], legacy)
    return raw, ChatCalls(legacy, customs)


def _check_moderation(wanted: Any) -> None:
    policy = wanted.get("policy") if isinstance(wanted, dict) else None
    modes = [x.get("mode") for x in (policy or {}).values() if isinstance(x, dict)]
    if "block" in modes:
        raise InvalidRequest("moderation: nothing is moderated here", "moderation")


def _take_functions(raw: Json, asked: Json) -> None:
    functions = asked["functions"]
    if not isinstance(functions, list) or not all(isinstance(x, dict) for x in functions):
        raise InvalidRequest("functions: a list of functions is needed", "functions")
    raw["tools"] = [{"type": "function", "function": x} for x in functions]
    raw["parallel_tool_calls"] = False  # a message has room for one
    choice = asked.get("function_call")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    if choice is not None:
        raw["tool_choice"] = choice


def _needs_offer(raw: Json) -> bool:
    """Say whether tools are more than functions, or chosen in another way than by name."""
    tools, choice = raw.get("tools"), raw.get("tool_choice")
    if not isinstance(tools, list) or not all(isinstance(x, dict) for x in tools):
        return False  # the check of the chat reports the mistake
    by_kind = isinstance(choice, dict) and choice.get("type") in ("allowed_tools", "custom")
    return by_kind or any(x.get("type") == "custom" for x in tools)


def _messages(messages: list[Any], legacy: bool) -> list[Any]:
    """Write earlier calls of custom tools, and of functions, as calls of tools."""
    shown: list[Any] = []
    last_call = "call"
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            return messages
        if isinstance(calls := message.get("tool_calls"), list):
            message = {**message, "tool_calls": [_call(x) for x in calls]}
        if legacy and isinstance(function := message.get("function_call"), dict):
            last_call = f"call_{i}"
            call = {"id": last_call, "type": "function", "function": function}
            message = {k: v for k, v in message.items() if k != "function_call"}
            message["tool_calls"] = [call]
        elif legacy and message.get("role") == "function":
            content = message.get("content") or ""
            message = {"role": "tool", "tool_call_id": last_call, "content": content}
        shown.append(message)
    return shown


def _call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(str(custom.get("input")))}
    return {"id": call.get("id", ""), "type": "function", "function": function}


def metadata_of(asked: Json) -> Json:
    """Return the request's metadata. Raises ``InvalidRequest`` if it is none."""
    try:
        return msgspec.convert(asked.get("metadata") or {}, Metadata)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"metadata: {error}", "metadata") from error
