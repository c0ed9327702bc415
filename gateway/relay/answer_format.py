"""How the answer to one turn is written to its client: as the engine wrote it, or changed.

Engines send the token counts of a stream in an event of its own, without choices, and only if
asked. The gateway always asks, since limits and figures need them; clients that did not would trip
over the event.

``max_tokens: 0`` has the prompt read and kept for the turn to come. vLLM refuses it, so it is asked
for one token, which is not shown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
from starlette.responses import Response

from engines.base import SessionRef
from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.relay.chat_chunks import DONE, KEEPALIVE, EventReader, SseFramer
from gateway.watch.metrics import Usage

STORED_HEADER = "x-thermocline-stored"
# Marks of this event alone; no text inside JSON can hold them, as their quotes are escaped there.
_COMPACT, _SPACED = b'"choices":[]', b'"choices": []'
LIMITS: Final = ("max_tokens", "max_completion_tokens")
_encode = msgspec.json.Encoder().encode


class NotStored(NamedTuple):
    """An answer could not be stored."""

    reason: str  # one of ``NOT_STORED``, see docs/generators/headers_page.py
    body: bytes | None = None  # what goes out in place of the answer, or its end; None: nothing

    @property
    def header(self) -> tuple[bytes, bytes]:
        """A header of the answer; that of a stream has gone out before."""
        return STORED_HEADER.encode(), f"no; reason={self.reason}".encode()


# Stores what must outlive an answer. Called once, when the answer is whole and before its end goes
# out, so that a client which has seen the end finds it. It must not raise: the answer goes on.
StoreAnswer: TypeAlias = Callable[[SessionRef], Awaitable[NotStored | None]]


class EventStream(Protocol):
    """The events of one streamed answer: the engine's bytes in, the client's bytes out."""

    @property
    def begun(self) -> bool:
        """True once an event that holds some of the answer has gone out."""

    @property
    def complete(self) -> bool:
        """True once the engine's stream ended as a stream should."""

    @property
    def failed(self) -> bool:
        """True if the engine itself reported an error in the stream."""

    def opening(self) -> bytes:
        """Return what goes out together with the head, before the engine says anything."""

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes; return all whole events that can go out now."""

    def ending(self, failure: Failure | None) -> bytes:
        """Return the last bytes of the answer, which report ``failure`` if there was one."""

    def usage(self) -> Usage | None:
        """Return the token counts of the answer; None if the engine reported none."""


class AnswerFormat(Protocol):
    """The shape of one turn's answer, whichever way it ends."""

    def events(self) -> EventStream:
        """Begin a streamed answer."""

    def whole(self, body: bytes) -> bytes:
        """Return the body for the client, made of the engine's JSON of a whole answer."""

    def refusal(self, failure: Failure) -> Response:
        """Return the answer to a request that the engine refused."""


@runtime_checkable
class TakesPromptUsage(Protocol):
    """An ``AnswerFormat`` whose first event says how long the prompt is."""

    def prompt_taken(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Take it from the head of the engine's answer, before any event is made."""


class PassThrough:
    """The engine's own bytes: it speaks what the client asked in."""

    def events(self) -> EventStream:
        return SseFramer()

    def whole(self, body: bytes) -> bytes:
        return body

    def refusal(self, failure: Failure) -> Response:
        return failure.response()


class EventsAround:
    """An ``EventStream`` around another: a subclass changes the chunks that are fed."""

    def __init__(self, events: EventStream) -> None:
        self._events = events

    @property
    def begun(self) -> bool:
        return self._events.begun

    @property
    def complete(self) -> bool:
        return self._events.complete

    @property
    def failed(self) -> bool:
        return self._events.failed

    def opening(self) -> bytes:
        return self._events.opening()

    def feed(self, chunk: bytes) -> bytes:
        return self._events.feed(chunk)

    def ending(self, failure: Failure | None) -> bytes:
        return self._events.ending(failure)

    def usage(self) -> Usage | None:
        return self._events.usage()


def asks_for_usage(raw: Json) -> bool:
    """Have the engine send a stream's token counts; True if its client did not ask for them."""
    options = raw.get("stream_options") or {}
    if not raw.get("stream") or options.get("include_usage"):
        return False
    raw["stream_options"] = {**options, "include_usage": True}
    return True


class _Around:
    """The part of an ``AnswerFormat`` that is another's."""

    def __init__(self, answer: AnswerFormat) -> None:
        self._answer = answer

    def whole(self, body: bytes) -> bytes:
        return self._answer.whole(body)

    def refusal(self, failure: Failure) -> Response:
        return self._answer.refusal(failure)


class HiddenUsage(_Around):
    """An ``AnswerFormat`` whose streams lack the event of the token counts."""

    def events(self) -> _WithoutUsage:
        return _WithoutUsage(self._answer.events())


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


def asks_for_nothing(raw: Json) -> bool:
    """Have a chat take one token if it asks for none; True if it did."""
    if "messages" not in raw or not any(raw.get(name) == 0 for name in LIMITS):
        return False
    for name in LIMITS:
        if name in raw:
            raw[name] = 1
    return True


class WithoutContent(_Around):
    """An ``AnswerFormat`` that empties the engine's answer before another writes it."""

    def events(self) -> _EmptiedEvents:
        return _EmptiedEvents(self._answer.events())

    def whole(self, body: bytes) -> bytes:
        return self._answer.whole(_emptied(body))


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
