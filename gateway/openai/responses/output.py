"""Builds the output items of a response, and their events, from the engine's answer.

Reasoning and text are each an item with one part; each tool call is an item. Reasoning and text
end when another item begins; calls end with the answer. A custom tool's input is inside the JSON
arguments of a function, so it is sent as a whole when the call is complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator

from engines.openai.messages import Json
from gateway.openai.chat_fields import custom_input
from gateway.relay.answer import CallPart, MessagePart


def new_id(prefix: str) -> str:
    """Return a new id that cannot be guessed: ``prefix``, then 48 hex digits."""
    return f"{prefix}_{secrets.token_hex(24)}"


class _Text:
    """An item with one part of text: the model's message, or its reasoning."""

    def __init__(self, index: int, thought: bool) -> None:
        self.thought = thought
        self.index = index
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []
        self._id = new_id("rs" if thought else "msg")
        self._event = "response.reasoning_text" if thought else "response.output_text"

    def item(self, status: str) -> Json:
        opened = status == "in_progress"
        content = [] if opened else [self._part()]
        if self.thought:
            return {"id": self._id, "type": "reasoning", "summary": [], "content": content}
        role = {"role": "assistant", "content": content}
        return {"id": self._id, "type": "message", "status": status, **role}

    def opening(self) -> Iterator[Json]:
        part = self._part()
        yield _added(self.index, self.item("in_progress"))
        yield {"type": "response.content_part.added", **self._where(), "part": part}

    def add(self, text: str, logprobs: Collection[Json]) -> Json:
        self._pieces.append(text)
        event = {"type": f"{self._event}.delta", **self._where(), "delta": text}
        if not self.thought:
            self._logprobs += logprobs
            event["logprobs"] = list(logprobs)
        return event

    def closing(self, item: Json) -> Iterator[Json]:
        part = self._part()
        done = {"type": f"{self._event}.done", **self._where(), "text": part["text"]}
        yield done if self.thought else {**done, "logprobs": self._logprobs}
        yield {"type": "response.content_part.done", **self._where(), "part": part}
        yield _done(self.index, item)

    def _part(self) -> Json:
        text = "".join(self._pieces)
        if self.thought:
            return {"type": "reasoning_text", "text": text}
        said = {"type": "output_text", "text": text, "annotations": []}
        return {**said, "logprobs": self._logprobs}

    def _where(self) -> Json:
        return {"item_id": self._id, "output_index": self.index, "content_index": 0}


class _Call:
    """The item of a tool call."""

    def __init__(self, index: int, part: CallPart, customs: Collection[str]) -> None:
        self._index = index
        self._name = part.function.name or ""
        self._custom = self._name in customs
        self._id = new_id("ctc" if self._custom else "fc")
        self._call_id = part.id or new_id("call")
        self._pieces: list[str] = []

    def item(self, status: str) -> Json:
        arguments = "".join(self._pieces)
        kind = "custom_tool_call" if self._custom else "function_call"
        named = {"id": self._id, "type": kind, "status": status, "call_id": self._call_id}
        if self._custom:
            text = custom_input(arguments) if status != "in_progress" else ""
            return {**named, "name": self._name, "input": text}
        return {**named, "name": self._name, "arguments": arguments}

    def opening(self) -> Iterator[Json]:
        yield _added(self._index, self.item("in_progress"))

    def add(self, arguments: str) -> Iterator[Json]:
        self._pieces.append(arguments)
        if not self._custom:
            kind = "response.function_call_arguments.delta"
            yield {"type": kind, **self._where(), "delta": arguments}

    def closing(self, item: Json) -> Iterator[Json]:
        if self._custom:
            kind = "response.custom_tool_call_input"
            yield {"type": f"{kind}.delta", **self._where(), "delta": item["input"]}
            yield {"type": f"{kind}.done", **self._where(), "input": item["input"]}
        else:
            said = {"name": self._name, "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._where(), **said}
        yield _done(self._index, item)

    def _where(self) -> Json:
        return {"item_id": self._id, "output_index": self._index}


class Output:
    """All output items of one response. Its methods yield events without sequence numbers."""

    def __init__(self, customs: Collection[str]) -> None:
        """
        Args:
            customs: names of the functions that stand for custom tools.
        """
        self._customs = customs
        self._items: list[Json] = []  # an item that has not ended is here as it began
        self._text: _Text | None = None
        self._calls: dict[int, tuple[int, _Call]] = {}  # by the engine's number

    @property
    def items(self) -> list[Json]:
        """The items; one that has not ended is without its content."""
        return self._items

    def add(self, part: MessagePart, scores: Collection[Json]) -> Iterator[Json]:
        """Add a part of the engine's answer; yield the events for it."""
        if part.thought:
            yield from self._say(part.thought, (), thought=True)
        if text := part.content or part.refusal:
            yield from self._say(text, scores, thought=False)
        elif scores and self._text is not None and not self._text.thought:
            yield self._text.add("", scores)
        for i, call in enumerate(part.tool_calls or ()):
            yield from self._call(i if call.index is None else call.index, call)

    def close(self, *, whole: bool) -> Iterator[Json]:
        """End all open items and yield the events; unless ``whole``, the last is incomplete."""
        last = len(self._items) - 1
        yield from self._end_text("completed" if whole or self._calls else "incomplete")
        for index, call in self._calls.values():
            item = call.item("completed" if whole or index < last else "incomplete")
            self._items[index] = item
            yield from call.closing(item)
        self._calls = {}

    def _say(self, text: str, scores: Collection[Json], *, thought: bool) -> Iterator[Json]:
        if self._text is None or self._text.thought is not thought:
            yield from self._end_text("completed")
            self._text = _Text(len(self._items), thought)
            self._items.append(self._text.item("in_progress"))
            yield from self._text.opening()
        yield self._text.add(text, scores)

    def _end_text(self, status: str) -> Iterator[Json]:
        if self._text is not None:
            text, self._text = self._text, None
            item = text.item(status)
            self._items[text.index] = item
            yield from text.closing(item)

    def _call(self, number: int, part: CallPart) -> Iterator[Json]:
        if number not in self._calls:
            yield from self._end_text("completed")
            index = len(self._items)
            call = _Call(index, part, self._customs)
            self._calls[number] = index, call
            self._items.append(call.item("in_progress"))
            yield from call.opening()
        if part.function.arguments:
            yield from self._calls[number][1].add(part.function.arguments)


def _added(index: int, item: Json) -> Json:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: Json) -> Json:
    return {"type": "response.output_item.done", "output_index": index, "item": item}
