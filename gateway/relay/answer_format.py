"""How the answer to one turn is written to its client: as the engine wrote it, or translated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from starlette.responses import Response

from engines.base import SessionRef
from gateway.errors import Failure
from gateway.metrics import Usage
from gateway.relay.sse_framer import SseFramer

STORED_HEADER = "x-thermocline-stored"


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
Keep: TypeAlias = Callable[[SessionRef], Awaitable[NotStored | None]]


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
class HearsOfPrompt(Protocol):
    """An ``AnswerFormat`` whose first event says how long the prompt is."""

    def prompt_taken(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Hear it from the head of the engine's answer, before any event is made."""


class AsItIs:
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
