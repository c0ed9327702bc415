"""The answer to one turn: what the engine says, and how it is written to the client.

``AnswerStream`` looks at each chunk of a stream, once, for all that want to know of it: what goes
out, when the first token came and how many there are, what the turn used, how the stream ended.
Only whole events go out, so that a stream which breaks can be ended with an event of ours and a
client never sees half of one. Of a stream that is passed on, events that only add to the answer are
counted and never parsed.

Engines send the token counts of a stream in an event of its own, without choices, and only if
asked. The gateway always asks, since limits and figures need them; clients that did not would trip
over the event. ``max_tokens: 0`` has the prompt read and kept for the turn to come. vLLM refuses
it, so it is asked for one token, which is not shown.

Only the fields that a translation needs are read. Both names of a model's reasoning are known:
``reasoning_content``, and ``reasoning`` as newer vLLM writes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from starlette.responses import Response

from engines.base import EngineUnavailable, SessionRef
from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.watch.requests import Usage

# An event larger than this is passed on before it is whole.
MAX_HELD_BYTES = 1 << 20
# An event larger than this is no chunk of an answer.
MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
KEEPALIVE = b": keepalive\n\n"
_EVENT, _PREFILL = b"data:", b": prefill "
_LONGEST_COMMENT = 60
# No text inside JSON can hold it, as its quotes are escaped there.
_ADDS = b'"choices":[{'


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


class FirstWords:
    """The first words of an answer, noted on its way: its chat is known again by them."""

    def __init__(self, num_chars: int, on_words: Callable[[str], None]) -> None:
        """
        Args:
            num_chars: that are enough of the answer.
            on_words: called once with so many, or with all if the answer has fewer.
        """
        self._num_chars = num_chars
        self._on_words: Callable[[str], None] | None = on_words
        self._words = ""

    @property
    def wanted(self) -> bool:
        """False once there are enough."""
        return self._on_words is not None

    def add(self, data: bytes) -> None:
        """Take an event's data, or a whole answer."""
        with suppress(EngineUnavailable):  # who reads the answer reports that
            for choice in read_chunk(data).choices[:1]:
                self._words += choice.part.content or ""
        if len(self._words.lstrip()) >= self._num_chars:
            self.end()

    def end(self) -> None:
        """Note what there is: the engine says no more."""
        on_words, self._on_words = self._on_words, None
        if on_words is not None:
            on_words(self._words)


class AnswerStream:
    """The events of one streamed answer: the engine's bytes in, the client's bytes out.

    This one passes them on as they are; see ``TranslatedStream``.
    """

    def __init__(self, hides_usage: bool = False) -> None:
        """``hides_usage``: leave out the event of the token counts."""
        self._hides_usage = hides_usage
        self._held = b""
        self.num_events = 0  # that hold some of the answer, each about a token
        self.prefill: tuple[int, int] | None = None  # tokens of the prompt that are there, and all
        self.usage: Usage | None = None  # None: the engine has not reported it
        self.complete = False  # it ended as a stream should
        self.failed = False  # the engine itself reported an error
        self.words: FirstWords | None = None  # None: they are not noted

    def opening(self) -> bytes:
        """Return what goes out together with the head, before the engine says anything."""
        return b""

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes; return all whole events that can go out now."""
        if self._held or not chunk.endswith(b"\n\n"):
            chunk = self._whole_events(self._held + chunk)
        num_events = chunk.count(_EVENT)
        is_heard = self.words is not None and self.words.wanted
        if self.num_events and num_events == chunk.count(_ADDS) and not is_heard:
            self.num_events += num_events
            return chunk
        return b"".join(self._shown(chunk.splitlines(keepends=True)))

    def ending(self, failure: Failure | None) -> bytes:
        """Return the last bytes of the answer, which report ``failure`` if there was one."""
        return failure.event() if failure else b""

    def _whole_events(self, data: bytes) -> bytes:
        cut = max(_end_of_last(data, b"\n\n"), _end_of_last(data, b"\r\n\r\n"))
        if len(data) - cut > MAX_HELD_BYTES:
            cut = len(data)
        self._held = data[cut:]
        return data[:cut]

    def _shown(self, lines: list[bytes]) -> Iterator[bytes]:
        is_hidden = False
        for line in lines:
            if is_hidden and not line.strip():  # the empty line after it
                is_hidden = False
                continue
            is_hidden = self._read_line(line) and self._hides_usage
            if not is_hidden:
                yield line

    def _read_line(self, line: bytes) -> bool:
        """Note what a line says; True for the event that only counts tokens."""
        if line.startswith(b":"):
            self._comment(line)
        if not line.startswith(_EVENT):
            return False
        data = line[len(_EVENT) :].strip()
        if data == DONE:
            self.complete = True
            return False
        self._hear(data)
        said = _peek(data)
        if said.error is not None:
            self.failed = True
        if said.usage is not None:
            self.usage = said.usage
        is_usage = said.choices == [] and said.usage is not None
        if not is_usage:
            self._count(data)
        return is_usage

    def _hear(self, data: bytes) -> None:
        if self.words is not None and self.words.wanted:
            self.words.add(data)

    def _count(self, event: bytes) -> None:
        """Count an event unless it only begins the answer, and holds none of it."""
        begins = b'"role"' in event and (b'"content":""' in event or b'"content":null' in event)
        if self.num_events or not begins:
            self.num_events += 1

    def _comment(self, line: bytes) -> None:
        """Read ``: prefill 128/1905``."""
        if not line.startswith(_PREFILL) or len(line) > _LONGEST_COMMENT:
            return
        done, _, whole = line[len(_PREFILL) :].strip().partition(b"/")
        if done.isdigit() and whole.isdigit():
            self.prefill = min(int(done), int(whole)), int(whole)


class TranslatedStream(AnswerStream, ABC):
    """A stream whose events are each made anew, from those of the engine, by a subclass."""

    comment = KEEPALIVE  # what goes out for a comment of the engine's

    def feed(self, chunk: bytes) -> bytes:
        """See ``AnswerStream.feed``.

        Raises:
            EngineUnavailable: an event cannot be read, or is too large to be one.
        """
        if self._held:
            chunk, self._held = self._held + chunk, b""
        cut = chunk.rfind(b"\n") + 1
        if cut < len(chunk):
            self._held = chunk[cut:]
            if len(self._held) > MAX_EVENT_BYTES:
                self._held = b""
                raise EngineUnavailable("its answer cannot be read")
        return b"".join(map(self._line, chunk[:cut].splitlines()))

    @abstractmethod
    def translated(self, data: bytes) -> bytes:
        """Return what goes out for an event's data; sets ``usage`` and ``failed``.

        Raises:
            EngineUnavailable: it cannot be read.
        """

    def _line(self, line: bytes) -> bytes:
        if line.startswith(b":"):
            self._comment(line)
            return self.comment
        if not line.startswith(_EVENT):
            return b""
        data = line[len(_EVENT) :].strip()
        if data == DONE:
            self.complete = True
            return b""
        self._hear(data)
        self._count(data)
        return self.translated(data)


class _Peek(msgspec.Struct, frozen=True):
    """The fields that tell the end of a stream."""

    choices: list[msgspec.Raw] | None = None
    usage: Usage | None = None
    error: Any = None


_peek_decoder: Final = msgspec.json.Decoder(_Peek)
_NOTHING_SAID: Final = _Peek()


def _peek(data: bytes) -> _Peek:
    try:
        return _peek_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _NOTHING_SAID


def parse_usage(body: bytes) -> Usage | None:
    """Read ``usage`` of an answer's JSON; None if it has none that can be read."""
    return _peek(body).usage


def _end_of_last(data: bytes, boundary: bytes) -> int:
    found = data.rfind(boundary)
    return found + len(boundary) if found >= 0 else 0


STORED_HEADER = "x-thermocline-stored"


class NotStored(NamedTuple):
    """An answer could not be stored."""

    reason: str  # one of those in docs/generators/headers_page.py
    body: bytes | None = None  # what goes out in place of the answer, or its end; None: nothing

    @property
    def header(self) -> tuple[bytes, bytes]:
        """A header of the answer; that of a stream has gone out before."""
        return STORED_HEADER.encode(), f"no; reason={self.reason}".encode()


# Stores what must outlive an answer, unless its session was deleted meanwhile, as the second
# argument says. Called once, when the answer is whole and before its end goes out, so that a client
# which has seen the end finds it. It must not raise: the answer goes on.
StoreAnswer: TypeAlias = Callable[[SessionRef, Callable[[], bool]], Awaitable[NotStored | None]]


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
