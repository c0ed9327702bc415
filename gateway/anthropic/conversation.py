"""The messages of Anthropic's request, written as the messages of a chat.

Each message becomes one text. The blocks of a user's or system message are joined by line ends,
those of an assistant without any, since a model wrote them in one go. If the engine sees images,
those of users and of tool results become parts of a user's message. Other images and files are
refused in a user's message; in a tool result or an assistant's message a sentence replaces them.
Blocks of kinds that mean nothing to a model here are left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from engines.openai.errors import InvalidRequest
from engines.openai.messages import MEDIA, SHOWN_BELOW, ImageSupport, in_place_of
from engines.openai.requests import Json
from gateway.anthropic.request import AnthropicTurn, Blocks, CountRequest

# Claude Code begins each prompt with a line on billing that has a nonce in it: prompts would differ
# from the first token on, and no prefix could be reused.
ATTRIBUTION: Final = "x-anthropic-billing-header:"
# Kinds of blocks that are left out and counted by name; any other kind counts as "block_other".
_LEFT_OUT: Final = frozenset(
    {"redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"}
    | {"code_execution_tool_result", "bash_code_execution_tool_result", "container_upload"}
    | {"text_editor_code_execution_tool_result", "tool_search_tool_result", "tool_reference"}
    | {"mcp_tool_use", "mcp_tool_result", "compaction", "fallback"}
)
_MEDIA: Final = re.compile(r"image/[a-zA-Z0-9.+-]{1,64}")


class Conversation:
    """The messages of a chat, and a metric's label for each part that was left out of them."""

    def __init__(self, image_support: ImageSupport) -> None:
        self.image_support = image_support
        self.messages: list[Json] = []
        self.left_out: list[str] = []

    def add(self, role: str, content: str | list[Json] | None, **more: object) -> None:
        """Append a message with those fields of ``more`` that are not empty."""
        kept = {name: value for name, value in more.items() if value}
        self.messages.append({"role": role, "content": content, **kept})


def chat_messages(request: CountRequest, image_support: ImageSupport) -> Conversation:
    """Translate system text and messages into a chat, without the line of ``ATTRIBUTION``.

    Args:
        image_support: the kinds of images that the engine takes.

    Raises:
        InvalidRequest: a block lacks a field, or holds an image or a file that the engine cannot
            take.
    """
    chat = Conversation(image_support)
    system = _system_text(chat, request.system)
    if system:
        chat.add("system", system)
    for i, turn in enumerate(request.messages):
        _WRITERS[turn.role](chat, turn, f"messages[{i}]")
    return chat


def _system_text(chat: Conversation, system: str | Blocks | None) -> str:
    if isinstance(system, str):
        if not system.startswith(ATTRIBUTION):
            return system
        chat.left_out.append("attribution")
        return system.partition("\n")[2].lstrip("\n")
    texts = []
    for i, block in enumerate(system or ()):
        text = _text_of(chat, block, f"system[{i}]")
        if text.startswith(ATTRIBUTION):
            chat.left_out.append("attribution")
            text = text.partition("\n")[2].lstrip("\n")
        texts.append(text)
    return "\n".join(x for x in texts if x)


def _write_system(chat: Conversation, turn: AnthropicTurn, where: str) -> None:
    if text := _joined(chat, turn.content, where):
        chat.add("system", text)


def _write_user(chat: Conversation, turn: AnthropicTurn, where: str) -> None:
    if isinstance(turn.content, str):
        chat.add("user", turn.content)
        return
    said, before = _Said(chat), len(chat.messages)
    for block, place in _placed(turn.content, where):
        if block.get("type") == "tool_result":
            said.flush()
            text, images = _result(chat, block, place)
            chat.add("tool", text, tool_call_id=_call_id(block, place))
            said.shown += images
        elif block.get("type") == "mid_conv_system":
            said.flush()
            if text := _joined(chat, block.get("content") or block.get("text") or "", place):
                chat.add("system", text)
        else:
            said.add(block, place)
    said.end()
    if len(chat.messages) == before:
        chat.add("user", "")  # the turn stays, even if nothing in it can be read


class _Said:
    """The text and images of a user's message since the last tool result in it.

    Consecutive tool results answer the calls of one message, and no message may stand between them,
    so their images are added after the last one.
    """

    def __init__(self, chat: Conversation) -> None:
        self._chat = chat
        self._parts: list[Json] = []
        self.shown: list[Json] = []  # images of the preceding results

    def add(self, block: Json, where: str) -> None:
        self._parts, self.shown = [*self._parts, *self.shown], []
        self._parts.append(_part_of(self._chat, block, where))

    def end(self) -> None:
        """Add the remaining text and images, after the last block."""
        self._parts, self.shown = [*self._parts, *self.shown], []
        self.flush()

    def flush(self) -> None:
        """Add the text and images so far as a message, if there are any."""
        parts, self._parts = [x for x in self._parts if x.get("text") != ""], []
        if any("image_url" in x for x in parts):
            self._chat.add("user", parts)
        elif parts:
            self._chat.add("user", "\n".join(x["text"] for x in parts))


def _write_assistant(chat: Conversation, turn: AnthropicTurn, where: str) -> None:
    if isinstance(turn.content, str):
        chat.add("assistant", turn.content)
        return
    texts, thoughts, calls = [], [], []
    for block, place in _placed(turn.content, where):
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "tool_use":
                calls.append(_call(block, place))
            case _:
                texts.append(_said_before(chat, block, place))
    text = "".join(texts)
    chat.add(
        "assistant",
        text if text or not calls else None,
        reasoning_content="".join(thoughts),
        tool_calls=calls,
    )


def _said_before(chat: Conversation, block: Json, where: str) -> str:
    """Return the text of an assistant's block; for an image or a file, a sentence in its place."""
    kind = str(block.get("type"))
    try:
        return _text_of(chat, block, where)
    except InvalidRequest:
        if kind not in MEDIA:
            raise
    sentence, word = in_place_of(kind, "answer")
    chat.left_out.append(word)
    return sentence


_WRITERS: Final[dict[str, Callable[[Conversation, AnthropicTurn, str], None]]] = {
    "system": _write_system,
    "user": _write_user,
    "assistant": _write_assistant,
}


def _placed(blocks: Sequence[Json], where: str) -> Iterator[tuple[Json, str]]:
    for i, block in enumerate(blocks):
        yield block, f"{where}.content[{i}]"


def _joined(chat: Conversation, content: Any, where: str) -> str:
    """Return the text of ``content``, which may be a string or a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(x, dict) for x in content):
        raise InvalidRequest(f"{where}: a content is a string or a list of blocks", where)
    texts = [_text_of(chat, block, place) for block, place in _placed(content, where)]
    return "\n".join(x for x in texts if x)


def _text_of(chat: Conversation, block: Json, where: str) -> str:
    """Return the text of a block; a block without any is left out and counted, and gives ""."""
    kind = str(block.get("type"))
    if kind == "text":
        return _string(block, "text", where)
    if kind == "search_result":
        head = [str(block.get(name) or "") for name in ("title", "source")]
        return "\n".join(x for x in (*head, _joined(chat, block.get("content", []), where)) if x)
    if kind in MEDIA:  # also names from other dialects
        return _seen(chat, block, where)
    chat.left_out.append(f"block_{kind}" if kind in _LEFT_OUT else "block_other")
    return ""


def _seen(chat: Conversation, block: Json, where: str) -> str:
    """Return the text of a document. Raises ``InvalidRequest`` for images and other files."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "text":
        texts = [str(block.get("title") or ""), _string(source, "data", where)]
        return "\n".join(x for x in texts if x)
    if source.get("type") == "content":
        return _joined(chat, source.get("content"), where)
    raise InvalidRequest(
        f"{where}: only text can be read here, not a block of type {block['type']!r}",
        where,
    )


def _result(chat: Conversation, block: Json, where: str) -> tuple[str, list[Json]]:
    """Return a tool result's text and its images."""
    content, images = block.get("content") or "", list[Json]()
    if isinstance(content, list):
        content, images = _result_parts(chat, content, where)
    text = _joined(chat, content, where)
    if images and not text:
        text = SHOWN_BELOW
    # Chat templates cannot mark a failed call, so the text says it, once.
    failed = block.get("is_error") is True and not text.lstrip("<").lower().startswith("error")
    return (f"Error: {text}" if failed else text), images


def _result_parts(
    chat: Conversation, blocks: list[Any], where: str
) -> tuple[list[Any], list[Json]]:
    """Return a result's other blocks and its images; a sentence replaces an unsupported image."""
    rest: list[Any] = []
    images: list[Json] = []
    for block, place in _placed(blocks, where):
        kind = block.get("type") if isinstance(block, dict) else None
        try:
            if kind == "image":
                images.append(_image(chat, block, place))
            elif kind in ("document", "search_result"):
                rest.append({"type": "text", "text": _text_of(chat, block, place)})
            elif isinstance(kind, str) and kind != "text" and kind not in _LEFT_OUT:
                rest.append({"type": "text", "text": _string(block, "text", place)})
            else:
                rest.append(block)
        except InvalidRequest:
            sentence, word = in_place_of(str(kind))
            chat.left_out.append(word)
            rest.append({"type": "text", "text": sentence})
    return rest, images


def _part_of(chat: Conversation, block: Json, where: str) -> Json:
    if _is_image(block):
        return _image(chat, block, where)
    return {"type": "text", "text": _text_of(chat, block, where)}


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _image(chat: Conversation, block: Json, where: str) -> Json:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    place = f"{where}.source"
    match source.get("type"):
        case "url":
            url = source.get("url")
        case "base64":
            media, data = _string(source, "media_type", place), _string(source, "data", place)
            if not _MEDIA.fullmatch(media):
                raise InvalidRequest(
                    f"{place}.media_type: the type of an image is needed, such as image/png",
                    f"{place}.media_type",
                )
            url = f"data:{media};base64,{data}"
        case _:
            raise InvalidRequest(f"{place}.type: use base64 or url", f"{place}.type")
    return chat.image_support.part(url, where, "image")


def _call_id(block: Json, where: str) -> str:
    return _string(block, "tool_use_id", where)


def _call(block: Json, where: str) -> Json:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where}.input: a tool's input is an object", f"{where}.input")
    arguments = msgspec.json.encode(given).decode()
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _string(block: Json, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name}: a string is needed here", f"{where}.{name}")
    return value
