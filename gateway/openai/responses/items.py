"""Translates the items of a response's input into the messages of a chat.

An assistant's thoughts, text and calls of one turn are several items, and become one message. So a
conversation gives the same messages, and the same tokens, as it does in a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engines.openai.errors import InvalidRequest
from engines.openai.messages import (
    FILE_LEFT_OUT,
    IMAGE_LEFT_OUT,
    MEDIA,
    SHOWN_BELOW,
    ImageSupport,
    Json,
    in_place_of,
)
from gateway.openai.chat_fields import custom_arguments

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_TEXTS = _TEXT_PARTS | {"refusal"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_IMAGES = frozenset({"input_image", "computer_screenshot"})
_NOT_TEXT = _IMAGES | {"input_file", "input_audio"}
# Names of the item that asks for, or holds, a compacted history; Codex has used several.
_COMPACTIONS = frozenset(
    {"compaction", "compaction_summary", "context_compaction", "compaction_trigger"}
)
MAX_DEPTH = 64
MAX_VALUES = 16 << 10
_NESTS = frozenset({dict, list})


def check_nesting(items: Sequence[Json], where: str) -> None:
    """Refuse items that are nested too deeply or have too many values to be stored and read again.

    Raises:
        InvalidRequest: the error names the item.
    """
    for i, item in enumerate(items):
        level: list[Any] = [item]
        depth = num_values = 0
        while level:
            depth += 1
            num_values += len(level)
            if depth > MAX_DEPTH:
                raise _wrong(f"{where}[{i}]", f"an item may have at most {MAX_DEPTH} levels")
            if num_values > MAX_VALUES:
                raise _wrong(f"{where}[{i}]", f"an item may have at most {MAX_VALUES} values")
            inner = (x.values() if isinstance(x, dict) else x for x in level if type(x) in _NESTS)
            level = [y for x in inner for y in x]


def kind_of(item: Json) -> str:
    """Return the type of an item, which may be absent in a message or a reference."""
    given = item.get("type")
    if isinstance(given, str):
        return given
    return "message" if "role" in item else "item_reference"


class MessageWriter:
    """Translates items one by one; ``skipped`` has a label for each that a chat cannot hold."""

    def __init__(self, image_support: ImageSupport) -> None:
        self._sight = image_support
        self._shown: list[Json] = []  # images of consecutive tool outputs, added after the last one
        self.skipped: list[str] = []
        self._messages: list[Json] = []
        self._thought = ""

    def messages(self) -> list[Json]:
        """Return all messages so far."""
        self._end_outputs()
        return self._messages

    def add_all(self, items: Sequence[Json], where: str) -> None:
        """Add items; ``where`` names their list in errors.

        Raises:
            InvalidRequest: an item is malformed, or has parts the engine cannot take; the error
                names it.
        """
        for i, item in enumerate(items):
            self._add(item, f"{where}[{i}]")

    def _add(self, item: Json, where: str) -> None:
        kind = kind_of(item)
        if not kind.endswith("_call_output"):
            self._end_outputs()
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._thought += _text(item.get("content") or item.get("summary"), f"{where}.content")
        elif kind.endswith("_call_output"):
            self._add_output(item, where)
        elif kind.endswith("_call") and isinstance(item.get("call_id"), str):
            self._add_call(kind, item, where)
        elif kind in _COMPACTIONS:
            raise _wrong(where, f"{kind}: not supported here; send a summary as a message")
        else:
            self.skipped.append(kind)

    def _add_message(self, item: Json, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _wrong(f"{where}.role", "use user, assistant, system or developer")
        if role == "user":
            self._thought = ""
            said = self._content(item.get("content"), f"{where}.content")
            self._messages.append({"role": role, "content": said})
            return
        content = item.get("content")
        if role == "assistant" and isinstance(content, list):
            content = [self._said_before(part) for part in content]
        text = _text(content, f"{where}.content")
        if role != "assistant":
            self._thought = ""
            self._messages.append({"role": _ROLES[role], "content": text})
            return
        message: Json = {"role": "assistant", "content": text}
        if self._thought:
            message["reasoning_content"], self._thought = self._thought, ""
        self._messages.append(message)

    def _add_call(self, kind: str, item: Json, where: str) -> None:
        name, arguments = _called(kind, item, where)
        call = {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> Json:
        """Return the assistant's message that a call belongs to: the last one, or a new one."""
        last = self._messages[-1] if self._messages else None
        if last is not None and last["role"] == "assistant" and not self._thought:
            return last
        message: Json = {"role": "assistant", "content": None}
        if self._thought:
            message["reasoning_content"], self._thought = self._thought, ""
        self._messages.append(message)
        return message

    def _add_output(self, item: Json, where: str) -> None:
        call_id = item.get("call_id") or item.get("id")  # local_shell_call_output has only an id
        if not isinstance(call_id, str):
            raise _wrong(f"{where}.call_id", "an output needs the id of its call")
        self._thought = ""
        text, images = self._output(item.get("output"), f"{where}.output")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        self._shown += images

    def _output(self, output: Any, where: str) -> tuple[str, list[Json]]:
        """Return the text of a tool's output, or its JSON if it is no text; and its images."""
        if output is None or isinstance(output, str):
            return output or "", []
        if _type_of(output) in _IMAGES:  # a computer's
            output = [output]
        elif isinstance(output, dict) and isinstance(output.get("content"), list):  # MCP's
            output = output["content"] if _has_parts(output["content"]) else output
        if not isinstance(output, list) or not _has_parts(output):
            return msgspec.json.encode(output).decode(), []
        parts = [self._output_part(x, f"{where}[{i}]") for i, x in enumerate(output)]
        images = [x for x in parts if isinstance(x, dict)]
        texts = [x for x in parts if isinstance(x, str)]
        between = "\n" if {IMAGE_LEFT_OUT, FILE_LEFT_OUT} & set(texts) else ""
        return between.join(texts) or (SHOWN_BELOW if images else ""), images

    def _output_part(self, part: Json, where: str) -> str | Json:
        """Return a part's text or its image; a sentence for a part that the engine cannot take."""
        kind, url = _type_of(part), part.get("image_url")
        if kind in _TEXTS:
            return _part_text(part, where)
        if kind in _IMAGES and self._sight.takes(url):
            return self._sight.part(url, where, kind, part.get("detail"))
        sentence, word = in_place_of(kind)
        self.skipped.append(word)
        return sentence

    def _said_before(self, part: Any) -> Any:
        """Replace an image or a file in an assistant's message by a sentence."""
        if (kind := _type_of(part)) not in MEDIA:
            return part
        sentence, word = in_place_of(kind, "answer")
        self.skipped.append(word)
        return {"type": "output_text", "text": sentence}

    def _content(self, content: Any, where: str) -> str | list[Json]:
        """Return a user's content: one text, or a list of parts if there are images in it."""
        if not isinstance(content, list) or not any(_is_image(part) for part in content):
            return _text(content, where)
        return [self._part(part, f"{where}[{i}]") for i, part in enumerate(content)]

    def _part(self, part: Any, where: str) -> Json:
        if not _is_image(part):
            return {"type": "text", "text": _part_text(part, where)}
        if part.get("file_id"):
            raise _wrong(f"{where}.file_id", "this server keeps no files: send the image itself")
        return self._sight.part(part.get("image_url"), where, "input_image", part.get("detail"))

    def _end_outputs(self) -> None:
        """Add the images of tool outputs as a user's message; templates allow them nowhere else."""
        if self._shown:
            self._messages.append({"role": "user", "content": self._shown})
            self._shown = []


def _called(kind: str, item: Json, where: str) -> tuple[str, str]:
    """Return name and arguments of a call; for other kinds of calls, fields that describe them."""
    if kind not in ("function_call", "custom_tool_call"):
        about = {k: v for k, v in item.items() if k in ("action", "operation", "arguments")}
        return kind.removesuffix("_call"), msgspec.json.encode(about).decode()
    name = item.get("name")
    given = item.get("arguments" if kind == "function_call" else "input", "")
    if not isinstance(name, str):
        raise _wrong(f"{where}.name", "a call needs the name of its function")
    if not isinstance(given, str):
        raise _wrong(where, "the arguments or the input of a call must be a string")
    return name, given if kind == "function_call" else custom_arguments(given)


def _has_parts(output: list[Any]) -> bool:
    """Return whether a tool's output is a list of parts, and not other JSON."""
    if not all(isinstance(x, dict) and "type" in x for x in output):
        return False
    return not output or any(_is_part(x) for x in output)


def _is_part(given: Json) -> bool:
    """Return whether this is a text, image or file part, of this or of another dialect."""
    kind = _type_of(given)
    if kind == "resource":  # MCP's
        return isinstance(given.get(kind), dict) and "blob" in given[kind]
    if kind not in MEDIA:
        return kind in _TEXTS | _NOT_TEXT
    held = given.get("source", given.get(kind))
    has_data = kind in ("image", "audio") and isinstance(given.get("data"), str)  # MCP's
    return kind in _NOT_TEXT or has_data or "image_url" in given or isinstance(held, dict)


def _type_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else ""


def _is_image(part: Any) -> bool:
    return _type_of(part) == "input_image"


def _text(content: Any, where: str) -> str:
    """Return the text of a content, which may be a string or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _wrong(where, "content is a string or a list of parts")
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = _type_of(part)
    if kind in _TEXT_PARTS:
        text = part.get("text")
    elif kind == "refusal":
        text = part.get("refusal")
    elif kind in _NOT_TEXT:
        raise _wrong(f"{where}.type", f"only text can be read here, not {kind!r}")
    else:
        raise _wrong(f"{where}.type", "use input_text or output_text")
    if not isinstance(text, str):
        raise _wrong(where, "a part needs its text")
    return text


def _wrong(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}", param)
