"""Counts the tokens of a stream whose client did not ask for them: that event is not passed on.

Engines send the counts in an event of its own, without choices, and only if asked. The gateway
always asks, since limits and figures need them; clients that did not would trip over the event.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.relay.answer_format import AnswerFormat, EventsAround

# Marks of this event alone; no text inside JSON can hold them, as their quotes are escaped there.
_COMPACT, _SPACED = b'"choices":[]', b'"choices": []'


def asks_for_usage(raw: Json) -> bool:
    """Have the engine send a stream's token counts; True if its client did not ask for them."""
    options = raw.get("stream_options") or {}
    if not raw.get("stream") or options.get("include_usage"):
        return False
    raw["stream_options"] = {**options, "include_usage": True}
    return True


class HiddenUsage:
    """An ``AnswerFormat`` whose streams lack the event of the token counts."""

    def __init__(self, answer: AnswerFormat) -> None:
        self._answer = answer

    def events(self) -> _WithoutUsage:
        return _WithoutUsage(self._answer.events())

    def whole(self, body: bytes) -> bytes:
        return self._answer.whole(body)

    def refusal(self, failure: Failure) -> Response:
        return self._answer.refusal(failure)


class _WithoutUsage(EventsAround):
    """The events but for that of the token counts."""

    def feed(self, chunk: bytes) -> bytes:
        out = self._events.feed(chunk)
        if _COMPACT not in out and _SPACED not in out:  # for every chunk, so it must be cheap
            return out
        return b"".join(x for x in _split(out) if not _is_usage(x))


class _Event(msgspec.Struct, frozen=True):
    choices: list[Any] | None = None
    usage: Any = None


_decoder = msgspec.json.Decoder(_Event)


def _split(events: bytes) -> list[bytes]:
    """Cut whole events apart, each with the empty line after it."""
    for end in (b"\r\n\r\n", b"\n\n"):
        if events.endswith(end):
            return [x + end for x in events.split(end)[:-1]]
    return [events]


def _is_usage(event: bytes) -> bool:
    if not event.startswith(b"data: {"):
        return False
    try:
        said = _decoder.decode(event[len(b"data: ") :])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return said.choices == [] and said.usage is not None
