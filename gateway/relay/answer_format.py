"""How the answer to one turn is written to its client: as the engine wrote it, or changed.

Engines send the token counts of a stream in an event of its own, without choices, and only if
asked. The gateway always asks, since limits and figures need them; clients that did not would trip
over the event.

``max_tokens: 0`` has the prompt read and kept for the turn to come. vLLM refuses it, so it is asked
for one token, which is not shown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import msgspec
from starlette.responses import Response

from engines.base import SessionRef, Upstream
from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.relay.chat_chunks import AnswerStream, TranslatedStream
from gateway.watch.metrics import Usage

STORED_HEADER = "x-thermocline-stored"
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


class AnswerFormat:
    """The shape of one turn's answer, whichever way it ends; this one is the engine's own."""

    hides_usage = False  # of a stream whose client did not ask for it

    def events(self, prompt: Usage | None) -> AnswerStream:
        """Begin a streamed answer; ``prompt`` has the counts of the prompt, if they are known."""
        return AnswerStream(self.hides_usage)

    def whole(self, body: bytes) -> bytes:
        """Return the body for the client, made of the engine's JSON of a whole answer."""
        return body

    def refusal(self, failure: Failure) -> Response:
        """Return the answer to a request that the engine refused."""
        return failure.response()

    def sign_of_life(self) -> bytes:
        """Return the dialect's event for "still at it"; b"" if there is none."""
        return b""


def asks_for_usage(raw: Json) -> bool:
    """Have the engine send a stream's token counts; True if its client did not ask for them."""
    options = raw.get("stream_options") or {}
    if not raw.get("stream") or options.get("include_usage"):
        return False
    raw["stream_options"] = {**options, "include_usage": True}
    return True


def asks_for_nothing(raw: Json) -> bool:
    """Have a chat take one token if it asks for none; True if it did."""
    if "messages" not in raw or not any(raw.get(name) == 0 for name in LIMITS):
        return False
    for name in LIMITS:
        if name in raw:
            raw[name] = 1
    return True


class WithoutContent:
    """An engine's answer with nothing said in it; an ``engines.base.Upstream``."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    @property
    def status(self) -> int:
        return self._upstream.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._upstream.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        events = _EmptiedStream()
        async for chunk in self._upstream.chunks():
            if emptied := events.feed(chunk):
                yield emptied
        if events.complete:
            yield b"data: [DONE]\n\n"

    async def read(self) -> bytes:
        return _emptied(await self._upstream.read())


class _EmptiedStream(TranslatedStream):
    def translated(self, data: bytes) -> bytes:
        return b"data: " + _emptied(data) + b"\n\n"


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
