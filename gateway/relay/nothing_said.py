"""A chat that asks for no answer at all, on an engine that gives one token at least.

``max_tokens: 0`` has the prompt read and kept for the turn to come. vLLM refuses it, so it is asked
for one token, which is not shown.
"""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.relay.answer_format import AnswerFormat, EventsAround, EventStream
from gateway.relay.chat_chunks import DONE, KEEPALIVE, EventReader

LIMITS: Final = ("max_tokens", "max_completion_tokens")
_encode = msgspec.json.Encoder().encode


def asks_for_nothing(raw: Json) -> bool:
    """Have a chat take one token if it asks for none; True if it did."""
    if "messages" not in raw or not any(raw.get(name) == 0 for name in LIMITS):
        return False
    for name in LIMITS:
        if name in raw:
            raw[name] = 1
    return True


class NothingSaid:
    """An ``AnswerFormat`` that empties the engine's answer before another writes it."""

    def __init__(self, answer: AnswerFormat) -> None:
        self._answer = answer

    def events(self) -> _EmptiedEvents:
        return _EmptiedEvents(self._answer.events())

    def whole(self, body: bytes) -> bytes:
        return self._answer.whole(_emptied(body))

    def refusal(self, failure: Failure) -> Response:
        return self._answer.refusal(failure)


class _EmptiedEvents(EventsAround):
    """The events with nothing said in them."""

    def __init__(self, events: EventStream) -> None:
        super().__init__(events)
        self._reader = EventReader()

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(self._events.feed(_event(data)) for data in self._reader.feed(chunk))


def _event(data: bytes) -> bytes:
    if data == KEEPALIVE:
        return data
    return b"data: " + (data if data == DONE else _emptied(data)) + b"\n\n"


def _emptied(data: bytes) -> bytes:
    """Take what was said out of an answer, or of a chunk; what is none stays as it is."""
    try:
        said = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    if not isinstance(said, dict) or "choices" not in said:
        return data
    for choice in said["choices"] or ():
        for name in ("message", "delta"):
            if isinstance(choice.get(name), dict):
                choice[name] = {"role": choice[name].get("role", "assistant"), "content": ""}
        if choice.get("finish_reason"):
            choice["finish_reason"] = "length"
        choice["logprobs"] = None
    if isinstance(usage := said.get("usage"), dict):
        usage |= {"completion_tokens": 0, "total_tokens": usage.get("prompt_tokens", 0)}
    return _encode(said)
