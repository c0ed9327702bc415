"""Reads the engine's answers to a chat, streamed or whole, for dialects that translate them.

Only the fields that a translation needs are read. Both names of a model's reasoning are known:
``reasoning_content``, and ``reasoning`` as newer vLLM writes it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engines.base import EngineUnavailable
from engines.openai.messages import Json
from gateway.metrics import Usage

# An event larger than this is no chunk of an answer.
MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
KEEPALIVE = b": keepalive\n\n"


class FunctionPart(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallPart(msgspec.Struct, frozen=True):
    """The part of one tool call that a chunk adds; in a whole answer, the call."""

    index: int | None = None
    id: str | None = None
    function: FunctionPart = FunctionPart()


class MessagePart(msgspec.Struct, frozen=True):
    """The part of the answer that a chunk adds; in a whole answer, the message."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPart] | None = None

    @property
    def thought(self) -> str:
        """The model's reasoning, "" if there is none."""
        return self.reasoning_content or self.reasoning or ""


class Logprobs(msgspec.Struct, frozen=True):
    content: list[Json] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk (``delta``) or of a whole answer (``message``)."""

    delta: MessagePart | None = None
    message: MessagePart | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None

    @property
    def part(self) -> MessagePart:
        return self.delta or self.message or _NOTHING

    @property
    def scores(self) -> list[Json]:
        """The tokens' log-probabilities, in OpenAI's shape."""
        return (self.logprobs.content if self.logprobs else None) or []


_NOTHING = MessagePart()


class Chunk(msgspec.Struct, frozen=True):
    """A chunk of an answer, or all of it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """Read one event's data, or a whole answer.

    Raises:
        EngineUnavailable: it is nothing of that form.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineUnavailable("its answer cannot be read") from error


class EventReader:
    """Takes the engine's bytes with any boundaries, gives the data of its whole events."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of all events that are whole now; a comment gives ``KEEPALIVE``.

        Raises:
            EngineUnavailable: an event is too large to be one.
        """
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        cut = chunk.rfind(b"\n") + 1
        if cut < len(chunk):
            self._held = chunk[cut:]
            if len(self._held) > MAX_EVENT_BYTES:
                raise EngineUnavailable("its answer cannot be read")
        return [x for x in map(_data, chunk[:cut].splitlines()) if x]


def _data(line: bytes) -> bytes:
    if line.startswith(b"data:"):
        return line[5:].strip()
    return KEEPALIVE if line.startswith(b":") else b""
