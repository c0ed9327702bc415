"""Translates OpenAI's chat request, and the tools of both its dialects, into fields of engines.

- A *custom* tool, which takes free text, becomes a function with one string argument, ``input``.
  The model is shown its grammar, if it has one; the grammar is not enforced.
- ``allowed_tools`` becomes a shorter list of tools, and deprecated ``functions`` become tools.
- Tools that only OpenAI's own servers run (``web_search_options``) are left out and counted.
- A sentence replaces each image or file in a tool's result that the engine cannot take, and each
  one in an assistant's message.

All other fields are passed on: ``metadata``, ``user``, ``service_tier``, ``verbosity``,
``prediction`` and the like cannot change the answer here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from engines.openai.errors import InvalidRequest
from engines.openai.messages import MEDIA, ImageSupport, Json, in_place_of, without_halves
from gateway.openai.stored_objects import Metadata

_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_RESULTS = ("tool", "function")  # roles of messages with tool results


class Offer(NamedTuple):
    """The tools of a request, translated for the engine."""

    tools: list[Json]
    choice: str | Json | None
    customs: frozenset[str]  # names of custom tools among them
    skipped: list[str]  # kinds that were left out


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool, for its input."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Return a custom tool's input from its function's arguments, or these if they are malformed.

    Lone surrogates that a model wrote are replaced.
    """
    try:
        said = msgspec.json.decode(without_halves(arguments)[0])
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = said.get("input") if isinstance(said, dict) else None
    return text if isinstance(text, str) else arguments


def offer(tools: Sequence[Json], choice: str | Json | None, *, nested: bool) -> Offer:
    """Translate tools, and the choice among them, into functions.

    Args:
        nested: True if a tool's fields are nested under its kind, as in a chat.

    Raises:
        InvalidRequest: a tool has no name of its own; or the choice is malformed, or names no tool.
    """
    functions: dict[str, Json] = {}
    customs: set[str] = set()
    skipped: list[str] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function")
        spec = tool.get(kind) if nested and isinstance(kind, str) else tool
        if kind not in ("function", "custom") or not isinstance(spec, dict):
            skipped.append(str(kind)[:40])
            continue
        name = spec.get("name")
        if not isinstance(name, str) or name in functions:
            raise InvalidRequest(
                f"tools[{i}].name: each tool needs a different name", f"tools[{i}].name"
            )
        functions[name] = _function(spec) if kind == "function" else _custom(name, spec)
        customs |= {name} if kind == "custom" else set()
    names, wanted = _chosen(choice, list(functions), skipped)
    shown = [{"type": "function", "function": functions[x]} for x in names]
    if wanted == "required" and not shown:
        raise InvalidRequest("tool_choice: none of the tools can be run here", "tool_choice")
    return Offer(shown, wanted if shown else None, frozenset(customs), skipped)


def _function(spec: Json) -> Json:
    return {key: spec[key] for key in _FUNCTION_FIELDS if spec.get(key) is not None}


def _custom(name: str, spec: Json) -> Json:
    words = [str(spec["description"])] if spec.get("description") else []
    form = spec.get("format")
    form = form.get("grammar", form) if isinstance(form, dict) else None
    if isinstance(form, dict) and form.get("definition"):
        words.append(f"The input follows this grammar ({form.get('syntax', 'lark')}):")
        words.append(str(form["definition"]))
    described = {"description": "\n".join(words)} if words else {}
    return {"name": name, **described, "parameters": _CUSTOM_SCHEMA}


def _chosen(
    choice: str | Json | None, names: list[str], skipped: Sequence[str]
) -> tuple[list[str], str | Json | None]:
    """Return the names of the tools to offer, and the choice among them in a chat's form."""
    if not isinstance(choice, dict):
        return names, choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), names, skipped)
    if kind in ("function", "custom"):
        name = _name(choice)
        if name not in names:
            message = f"tool_choice names {str(name)[:128]!r}, which is not in tools"
            raise InvalidRequest(f"tool_choice: {message}", "tool_choice")
        return names, {"type": "function", "function": {"name": name}}
    message = f"tools of type {str(kind)[:40]!r} are not run here"
    raise InvalidRequest(f"tool_choice: {message}", "tool_choice")


def _allowed(
    choice: object, names: list[str], skipped: Sequence[str]
) -> tuple[list[str], str | Json | None]:
    mode = choice.get("mode", "auto") if isinstance(choice, dict) else None
    tools = choice.get("tools") if isinstance(choice, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise InvalidRequest("tool_choice: allowed_tools needs mode and tools", "tool_choice")
    wanted = {_name(x) for x in tools if isinstance(x, dict)}
    unknown = {x for x in wanted if x is not None} - set(names)
    if unknown and not skipped:
        message = f"allowed_tools names {str(min(unknown))[:128]!r}, which is not in tools"
        raise InvalidRequest(f"tool_choice: {message}", "tool_choice")
    return [x for x in names if x in wanted], str(mode)


def _name(tool: Json) -> str | None:
    spec = tool.get(str(tool.get("type")), tool)
    name = spec.get("name") if isinstance(spec, dict) else None
    return name if isinstance(name, str) else None


class ChatCalls(NamedTuple):
    """The form of calls in the client's request: ``function_call``, or calls of custom tools."""

    legacy: bool = False
    customs: frozenset[str] = frozenset()


def for_engine(
    asked: Json, skipped: list[str], image_support: ImageSupport
) -> tuple[Json, ChatCalls]:
    """Translate a chat's body for the engine; return it, and the form of calls for the answer.

    Args:
        skipped: labels of parts that are left out are added to it.
        image_support: the kinds of images that the engine takes.

    Raises:
        InvalidRequest: the tools or the choice among them are malformed.
    """
    legacy = bool(asked.get("functions")) and not asked.get("tools")
    raw = {k: v for k, v in asked.items() if k not in ("functions", "function_call", "store")}
    if raw.pop("web_search_options", None) is not None:
        skipped.append("web_search")
    _check_moderation(raw.pop("moderation", None))
    if legacy:
        _take_functions(raw, asked)
    if isinstance(tools := raw.get("tools"), list):
        raw["tools"] = [_with_strict(x) for x in tools]
    customs: frozenset[str] = frozenset()
    if _needs_offer(raw):
        offered = offer(raw.pop("tools"), raw.pop("tool_choice", None), nested=True)
        customs = offered.customs
        if offered.skipped:
            raise InvalidRequest("tools: use function or custom", "tools")
        if offered.tools:
            raw["tools"], raw["tool_choice"] = offered.tools, offered.choice or "auto"
    if isinstance(raw.get("messages"), list):
        raw["messages"] = with_results(_messages(raw["messages"], legacy), image_support, skipped)
    return raw, ChatCalls(legacy, customs)


def with_results(messages: list[Any], image_support: ImageSupport, skipped: list[str]) -> list[Any]:
    """Replace images and files in tool results that the engine cannot take by a sentence.

    Those of the assistant are always replaced, since chat templates have no place for them.

    Args:
        skipped: a label of each is added to it.
    """
    return [_with_sentences(x, image_support, skipped) for x in messages]


def _with_sentences(message: Any, image_support: ImageSupport, skipped: list[str]) -> Any:
    if not isinstance(message, dict):
        return message
    message = _with_parts(message)
    if not isinstance(content := message.get("content"), list):
        return message
    if message.get("role") in _RESULTS:
        return {**message, "content": [_of_result(x, image_support, skipped) for x in content]}
    if message.get("role") == "assistant":
        return {**message, "content": [_said_before(x, skipped) for x in content]}
    return message


def _with_parts(message: Json) -> Json:
    """Move images that Ollama and OpenRouter put in a field ``images`` into the content's parts."""
    images = message.get("images")
    if message.get("role") == "user" or not isinstance(images, list) or not images:
        return message
    said = message.get("content") or []
    parts = said if isinstance(said, list) else [{"type": "text", "text": said}]
    kept = {name: value for name, value in message.items() if name != "images"}
    return {**kept, "content": [*parts, *({"type": "image"} for _ in images)]}


def _said_before(part: Any, skipped: list[str]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in MEDIA:
        return part
    sentence, word = in_place_of(kind, "answer")
    skipped.append(word)
    return {"type": "text", "text": sentence}


def _of_result(part: Any, image_support: ImageSupport, skipped: list[str]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in ("text", "refusal"):
        return part
    if isinstance(text := part.get("text"), str):  # a text part under another dialect's name
        return {"type": "text", "text": text}
    if kind == "image_url":
        image = part.get("image_url")
        if image_support.takes(image.get("url") if isinstance(image, dict) else None):
            return part
    sentence, word = in_place_of(kind)
    skipped.append(word)
    return {"type": "text", "text": sentence}


def _check_moderation(wanted: Any) -> None:
    policy = wanted.get("policy") if isinstance(wanted, dict) else None
    modes = [x.get("mode") for x in (policy or {}).values() if isinstance(x, dict)]
    if "block" in modes:
        raise InvalidRequest("moderation: this server does not moderate", "moderation")


def _take_functions(raw: Json, asked: Json) -> None:
    functions = asked["functions"]
    if not isinstance(functions, list) or not all(isinstance(x, dict) for x in functions):
        raise InvalidRequest("functions: a list of functions is needed", "functions")
    raw["tools"] = [{"type": "function", "function": x} for x in functions]
    raw["parallel_tool_calls"] = False  # a message has one ``function_call``
    choice = asked.get("function_call")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    if choice is not None:
        raw["tool_choice"] = choice


def _with_strict(tool: Any) -> Any:
    """Move a tool's ``strict`` into its function; in Responses it stands beside the function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "strict" not in tool:
        return tool
    rest = {name: value for name, value in tool.items() if name != "strict"}
    return {**rest, "function": {**function, "strict": function.get("strict", tool["strict"])}}


def _needs_offer(raw: Json) -> bool:
    """Return whether ``offer`` has to translate custom tools or ``allowed_tools``."""
    tools, choice = raw.get("tools"), raw.get("tool_choice")
    if not isinstance(tools, list) or not all(isinstance(x, dict) for x in tools):
        return False  # the check of the chat reports the mistake
    by_kind = isinstance(choice, dict) and choice.get("type") in ("allowed_tools", "custom")
    return by_kind or any(x.get("type") == "custom" for x in tools)


def _messages(messages: list[Any], legacy: bool) -> list[Any]:
    """Translate earlier calls of custom tools and deprecated functions into tool calls."""
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
    """Return the request's metadata. Raises ``InvalidRequest`` if it is malformed."""
    try:
        return msgspec.convert(asked.get("metadata") or {}, Metadata)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"metadata: {error}", "metadata") from error
