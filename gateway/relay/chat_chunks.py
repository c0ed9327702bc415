"""Reads the engine's answers to a chat: whole events of a stream, and the fields in them.

Only whole events go out, so that a stream which breaks can be ended with an event of ours and a
client never sees half of one. Only the last few events are ever parsed, at the end.

Only the fields that a translation needs are read. Both names of a model's reasoning are known:
``reasoning_content``, and ``reasoning`` as newer vLLM writes it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from engines.base import EngineUnavailable
from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.watch.metrics import Usage

# An event larger than this is passed on before it is whole.
MAX_HELD_BYTES = 1 << 20
# A stream ends with finish reason, usage and [DONE]; a chunk holds at least one event.
KEPT_CHUNKS = 6
KEPT_LINES = 4  # [DONE], the empty line after it, and a comment perhaps
# An event larger than this is no chunk of an answer.
MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
KEEPALIVE = b": keepalive\n\n"


class SseFramer:
    """Takes chunks with any boundaries, gives whole events, and remembers how the stream ended."""

    def __init__(self) -> None:
        self._held = b""
        self._last: deque[bytes] = deque(maxlen=KEPT_CHUNKS)
        self.begun = False  # an event (not just a keep-alive comment) has gone out

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return all events that are whole now, b"" if there are none."""
        if self._held or not chunk.endswith(b"\n\n"):
            chunk = self._whole_events(self._held + chunk)
            if not chunk:
                return chunk
        self._last.append(chunk)
        if not self.begun and b"data:" in chunk:
            self.begun = True
        return chunk

    def opening(self) -> bytes:
        """Return nothing: the engine says all there is to say."""
        return b""

    def ending(self, failure: Failure | None) -> bytes:
        """Return an event that reports ``failure``; nothing more if there was none."""
        return failure.event() if failure else b""

    def _whole_events(self, data: bytes) -> bytes:
        cut = max(_end_of_last(data, b"\n\n"), _end_of_last(data, b"\r\n\r\n"))
        if len(data) - cut > MAX_HELD_BYTES:
            cut = len(data)
        self._held = data[cut:]
        return data[:cut]

    @property
    def complete(self) -> bool:
        """True if [DONE] came on a line of its own; the text of an answer may contain it, too."""
        return b"data: [DONE]" in b"".join(self._last).splitlines()[-KEPT_LINES:]

    def usage(self) -> Usage | None:
        """Read the token counts in the last events; None if they hold none."""
        for line in reversed(b"".join(self._last).splitlines()):
            if line.startswith(b"data: {") and b'"usage"' in line:
                usage = parse_usage(line[len(b"data: ") :])
                if usage is not None:
                    return usage
        return None

    @property
    def failed(self) -> bool:
        """True if the engine itself reported an error in the stream."""
        return b'data: {"error"' in b"".join(self._last)


class _WithUsage(msgspec.Struct, frozen=True):
    usage: Usage | None = None


_with_usage = msgspec.json.Decoder(_WithUsage)


def parse_usage(body: bytes) -> Usage | None:
    """Read ``usage`` of an answer's or event's JSON; None if it has none that can be read."""
    try:
        return _with_usage.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _end_of_last(data: bytes, boundary: bytes) -> int:
    found = data.rfind(boundary)
    return found + len(boundary) if found >= 0 else 0


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


class AnswerChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk (``delta``) or of a whole answer (``message``)."""

    delta: MessagePart | None = None
    message: MessagePart | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string that ended it
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

    choices: list[AnswerChoice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def failure(self) -> str | None:
        """The engine's words for its failure; None if there was none."""
        if self.error is None:
            return None
        message = self.error.get("message") if isinstance(self.error, dict) else None
        return message if isinstance(message, str) else "The engine failed; its log says why."


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
            EngineUnavailable: an event is too large to be one; its bytes are dropped.
        """
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        cut = chunk.rfind(b"\n") + 1
        if cut < len(chunk):
            self._held = chunk[cut:]
            if len(self._held) > MAX_EVENT_BYTES:
                self._held = b""
                raise EngineUnavailable("its answer cannot be read")
        return [x for x in map(_data, chunk[:cut].splitlines()) if x]


def _data(line: bytes) -> bytes:
    if line.startswith(b"data:"):
        return line[5:].strip()
    return KEEPALIVE if line.startswith(b":") else b""
