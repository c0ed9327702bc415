"""The answer to a chat that is translated back, or stored, while it is passed on.

Most chats are neither: their bytes go through as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from engines.base import EngineUnavailable
from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.metrics import Usage
from gateway.openai.chat_fields import ChatCalls
from gateway.openai.tools import custom_input
from gateway.relay.chat_chunks import DONE, KEEPALIVE, EventReader

_encode = msgspec.json.Encoder().encode


class ChatAnswer:
    """See ``gateway.relay.answer_format.AnswerFormat``."""

    def __init__(self, calls: ChatCalls) -> None:
        self._calls = calls
        self._events: ChatEvents | None = None
        self._whole: Json | None = None

    @property
    def completion(self) -> Json | None:
        """The whole completion; None as long as it is not, and if it failed."""
        if self._events is not None:
            return self._events.completion if self._events.whole else None
        return self._whole

    def events(self) -> ChatEvents:
        self._events = ChatEvents(self._calls)
        return self._events

    def whole(self, body: bytes) -> bytes:
        said = _parsed(body)
        for choice in said.get("choices") or ():
            _show_calls(choice, choice.get("message") or {}, self._calls)
        self._whole = said
        return _encode(said)

    def refusal(self, failure: Failure) -> Response:
        return failure.response()


class ChatEvents:
    """Rewrites the chunks of one stream, and joins them; see ``EventStream`` of the relay."""

    def __init__(self, calls: ChatCalls) -> None:
        self._calls = calls
        self._reader = EventReader()
        self._customs: dict[tuple[int, int], Json] = {}  # calls whose input is not whole yet
        self._usage: Usage | None = None
        self.completion: Json = {}
        self.begun = False
        self.complete = False
        self.failed = False

    @property
    def whole(self) -> bool:
        """True if the stream ended as it should."""
        return self.complete and not self.failed and bool(self.completion)

    def opening(self) -> bytes:
        return b""

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(self._rewritten(data) for data in self._reader.feed(chunk))

    def ending(self, failure: Failure | None) -> bytes:
        self.failed = self.failed or failure is not None
        return failure.event() if failure else b"data: [DONE]\n\n"

    def usage(self) -> Usage | None:
        return self._usage

    def _rewritten(self, data: bytes) -> bytes:
        if data == KEEPALIVE:
            return data
        if data == DONE:
            self.complete = True  # sent with the ending: clients look for the stored object then
            return b""
        chunk = _parsed(data)
        if "error" in chunk:
            self.failed = True
        if chunk.get("usage"):
            self._usage = msgspec.convert(chunk["usage"], Usage)
        for choice in chunk.get("choices") or ():
            self._show(choice)
        if "error" not in chunk:
            _join(self.completion, chunk)
            self.begun = True
        return b"data: " + _encode(chunk) + b"\n\n"

    def _show(self, choice: Json) -> None:
        delta = choice.get("delta") or {}
        if self._calls.customs:
            self._hold_customs(choice, delta)
        _show_calls(choice, delta, self._calls)

    def _hold_customs(self, choice: Json, delta: Json) -> None:
        """Keep calls of custom tools back until the end: their input stands inside arguments."""
        passed = []
        for call in delta.get("tool_calls") or ():
            key = choice["index"], call["index"]
            function = call.get("function") or {}
            if function.get("name") in self._calls.customs:
                self._customs[key] = {**call, "function": {**function, "arguments": ""}}
            if key in self._customs:
                self._customs[key]["function"]["arguments"] += function.get("arguments") or ""
            else:
                passed.append(call)
        if choice.get("finish_reason"):
            passed += [x for (i, _), x in self._customs.items() if i == choice["index"]]
        if "tool_calls" in delta or passed:
            delta["tool_calls"] = passed
            choice["delta"] = delta


def _parsed(data: bytes) -> Json:
    try:
        said = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineUnavailable("its answer cannot be read") from error
    if not isinstance(said, dict):
        raise EngineUnavailable("its answer cannot be read")
    return said


def _show_calls(choice: Json, message: Json, wanted: ChatCalls) -> None:
    """Write the calls of a message, or of a chunk of one, as the client knows them."""
    calls = message.get("tool_calls")
    if wanted.legacy:
        if calls:
            message["function_call"] = calls[0].get("function")
        message.pop("tool_calls", None)
        if choice.get("finish_reason") == "tool_calls":
            choice["finish_reason"] = "function_call"
    elif calls and wanted.customs:
        message["tool_calls"] = [_shown_call(x, wanted) for x in calls]


def _shown_call(call: Json, wanted: ChatCalls) -> Json:
    function = call.get("function") or {}
    if function.get("name") not in wanted.customs:
        return call
    custom = {"name": function["name"], "input": custom_input(function.get("arguments") or "")}
    kept = {k: v for k, v in call.items() if k in ("index", "id")}
    return {**kept, "type": "custom", "custom": custom}


def _join(completion: Json, chunk: Json) -> None:
    """Add a chunk to the completion that all chunks make."""
    if not completion:
        completion.update({k: v for k, v in chunk.items() if k not in ("choices", "usage")})
        completion["object"] = "chat.completion"
        completion["choices"] = []
    if chunk.get("usage"):
        completion["usage"] = chunk["usage"]
    for part in chunk.get("choices") or ():
        choice = _choice(completion["choices"], part.get("index", 0))
        _add(choice["message"], part.get("delta") or {})
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        scores = (part.get("logprobs") or {}).get("content")
        if scores:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += scores


def _choice(choices: list[Json], index: int) -> Json:
    while len(choices) <= index:
        message = {"role": "assistant", "content": None, "refusal": None}
        ends = {"finish_reason": None, "logprobs": None}
        choices.append({"index": len(choices), "message": message, **ends})
    return choices[index]


def _add(message: Json, delta: Json) -> None:
    """Add what a chunk says to a message: texts are joined, calls by their number."""
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value or ():
                _add_call(message.setdefault(key, []), call)
        elif key == "function_call" and value:
            _add_text(message.setdefault(key, {}), value)
        elif key == "role" or value is None:
            continue
        elif isinstance(value, str):
            message[key] = (message.get(key) or "") + value
        else:
            message[key] = value


def _add_call(calls: list[Json], call: Json) -> None:
    index = call.get("index", len(calls))
    while len(calls) <= index:
        calls.append({})
    own = calls[index]
    for key, value in call.items():
        if isinstance(value, dict):
            _add_text(own.setdefault(key, {}), value)
        elif key != "index":
            own[key] = value


def _add_text(into: Json, more: Any) -> None:
    for key, value in more.items():
        into[key] = (into.get(key) or "") + (value or "")
