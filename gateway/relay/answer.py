"""Reads the engine's answer to a turn, and writes it for the client.

``AnswerStream`` looks at each chunk of a stream once. It returns the bytes for the client, and
notes the number of tokens, the turn's usage and how the stream ended. Only whole events are sent,
so that a broken stream can be ended with an event of ours. If the stream is passed on unchanged,
events that only add to the answer are counted and not parsed, except for the first words of a chat
that has no name.

Engines send the token counts of a stream in an event without choices, and only if asked. The
gateway always asks, since limits and figures need the counts, and hides the event from clients that
did not ask. ``max_tokens: 0`` only prefills the prompt, for a later turn. vLLM refuses it, so it is
asked for one token, which is not shown.

Only the fields that a translation needs are read. A model's reasoning has two names:
``reasoning_content``, and ``reasoning`` in newer vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from starlette.responses import Response

from engines.base import EngineUnavailable, SessionRef
from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.watch.requests import Usage

# A larger event is passed on before it is complete.
MAX_HELD_BYTES = 1 << 20
# A larger event cannot be a chunk of an answer.
MAX_EVENT_BYTES = 16 << 20
ENGINE_FAILED = "The engine failed; its log says why. Try again."
DONE = b"[DONE]"
KEEPALIVE = b": keepalive\n\n"
_EVENT, _PREFILL = b"data:", b": prefill "
_LONGEST_COMMENT = 60
# In each event that adds to the answer. It cannot be in a text, where JSON escapes the quotes.
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
        """The engine's error message; None if there was no error."""
        if self.error is None:
            return None
        error = self.error if isinstance(self.error, dict) and not _is_vllms(self.error) else {}
        message = error.get("message")
        return message if isinstance(message, str) else ENGINE_FAILED


_decoder = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """Parse one event's data, or a whole answer.

    Raises:
        EngineUnavailable: ``data`` is neither.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineUnavailable("its answer cannot be read") from error


class FirstWords:
    """Collects the first words of an answer, by which its chat is recognised later."""

    def __init__(self, num_chars: int, on_words: Callable[[str], None]) -> None:
        """
        Args:
            num_chars: the number of characters to collect.
            on_words: called once, with at least so many or with the whole answer.
        """
        self._num_chars = num_chars
        self._on_words: Callable[[str], None] | None = on_words
        self._words = ""

    @property
    def wanted(self) -> bool:
        """True until enough characters are here."""
        return self._on_words is not None

    def read(self, data: bytes) -> Chunk | None:
        """Parse an event's data, or a whole answer, and keep its text; None if it is malformed."""
        try:
            chunk = read_chunk(data)
        except EngineUnavailable:  # the relay reports it
            return None
        for choice in chunk.choices[:1]:
            self._words += choice.part.content or ""
        if len(self._words.lstrip()) >= self._num_chars:
            self.end()
        return chunk

    def end(self) -> None:
        """Call ``on_words`` with what is here, since the answer has ended."""
        on_words, self._on_words = self._on_words, None
        if on_words is not None:
            on_words(self._words)


class AnswerStream:
    """The events of one streamed answer: the engine's bytes in, the client's bytes out.

    This class passes the bytes on unchanged; ``TranslatedStream`` does not.
    """

    def __init__(self, hides_usage: bool = False) -> None:
        """
        Args:
            hides_usage: leave out the event with the token counts.
        """
        self._hides_usage = hides_usage
        self._held = b""
        self.num_events = 0  # with a part of the answer; each is about a token
        self.prefill: tuple[int, int] | None = None  # tokens prefilled so far, and of the prompt
        self.usage: Usage | None = None  # None: the engine has not reported it
        self.complete = False  # True: it ended with [DONE]
        self.failed = False  # the engine itself reported an error
        self.words: FirstWords | None = None  # None: they are not wanted

    def opening(self) -> bytes:
        """Return the bytes that follow the head, before the engine's first bytes."""
        return b""

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes; return those of all events that are complete now."""
        if self._held or not chunk.endswith(b"\n\n"):
            chunk = self._whole_events(self._held + chunk)
        num_events = chunk.count(_EVENT)
        if self.num_events and num_events == chunk.count(_ADDS) and not self._collecting:
            self.num_events += num_events
            return chunk
        return b"".join(self._shown(chunk.splitlines(keepends=True)))

    def ending(self, failure: Failure | None) -> bytes:
        """Return the last bytes of the answer; they report ``failure`` if there was one."""
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
            if is_hidden and not line.strip():  # the empty line after the hidden event
                is_hidden = False
                continue
            is_hidden = self._read_line(line) and self._hides_usage
            if not is_hidden:
                yield _with_our_words(line) if self.failed else line

    def _read_line(self, line: bytes) -> bool:
        """Note the facts in a line; return True for the event that only has token counts."""
        if line.startswith(b":"):
            self._comment(line)
        if not line.startswith(_EVENT):
            return False
        data = line[len(_EVENT) :].strip()
        if data == DONE:
            self.complete = True
            return False
        said = words.read(data) or _NOTHING_SAID if (words := self._collecting) else _peek(data)
        if said.error is not None:
            self.failed = True
        if said.usage is not None:
            self.usage = said.usage
        is_usage = said.choices == [] and said.usage is not None
        if not is_usage:
            self._count(data)
        return is_usage

    @property
    def _collecting(self) -> FirstWords | None:
        """The first words, while they are not complete."""
        return self.words if self.words is not None and self.words.wanted else None

    def _count(self, event: bytes) -> None:
        """Count an event, unless it only begins the answer and has no text."""
        begins = b'"role"' in event and (b'"content":""' in event or b'"content":null' in event)
        if self.num_events or not begins:
            self.num_events += 1

    def _comment(self, line: bytes) -> None:
        """Read a comment such as ``: prefill 128/1905``."""
        if not line.startswith(_PREFILL) or len(line) > _LONGEST_COMMENT:
            return
        done, _, whole = line[len(_PREFILL) :].strip().partition(b"/")
        if done.isdigit() and whole.isdigit():
            self.prefill = min(int(done), int(whole)), int(whole)


class TranslatedStream(AnswerStream, ABC):
    """A stream in which a subclass translates each event of the engine."""

    comment = KEEPALIVE  # sent in place of a comment of the engine

    def feed(self, chunk: bytes) -> bytes:
        """Do as ``AnswerStream.feed`` does.

        Raises:
            EngineUnavailable: an event cannot be parsed, or is larger than ``MAX_EVENT_BYTES``.
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
        """Return the client's bytes for an event's data; set ``usage`` and ``failed``.

        Raises:
            EngineUnavailable: ``data`` cannot be parsed.
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
        if words := self._collecting:
            words.read(data)
        self._count(data)
        return self.translated(data)


class _Peek(msgspec.Struct, frozen=True):
    """The fields of an event that the end of a stream is recognised by."""

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


def _is_vllms(error: Any) -> bool:
    """Return whether an event's error is a fault in vLLM; its words are of no use to the client."""
    return isinstance(error, dict) and error.get("code") == 500


def _with_our_words(line: bytes) -> bytes:
    if not line.startswith(_EVENT) or not _is_vllms(_peek(line[len(_EVENT) :].strip()).error):
        return line
    return b"data: " + Failure(502, ENGINE_FAILED, None, "engine").json() + b"\n"


def parse_usage(body: bytes) -> Usage | None:
    """Return ``usage`` of an answer's JSON; None if there is none, or it is malformed."""
    return _peek(body).usage


def _end_of_last(data: bytes, boundary: bytes) -> int:
    found = data.rfind(boundary)
    return found + len(boundary) if found >= 0 else 0


STORED_HEADER = "x-thermocline-stored"


class NotStored(NamedTuple):
    """The reason why an answer could not be stored, and what to send instead of it."""

    reason: str  # one of those in docs/generators/headers_page.py
    body: bytes | None = None  # sent in place of the answer, or of its end; None: no change

    @property
    def header(self) -> tuple[bytes, bytes]:
        """The header of a whole answer that gives the reason; a stream's head was sent earlier."""
        return STORED_HEADER.encode(), f"no; reason={self.reason}".encode()


# Stores an answer, unless the second argument returns that its session was deleted meanwhile.
# Called once, when the answer is complete and before its end is sent, so that a client which has
# seen the end finds the stored object. It must not raise, since the answer is sent in any case.
StoreAnswer: TypeAlias = Callable[[SessionRef, Callable[[], bool]], Awaitable[NotStored | None]]


class AnswerFormat:
    """The form of a turn's answer, streamed, whole or refused; this class keeps the engine's."""

    hides_usage = False  # True: the client did not ask for a stream's token counts

    def events(self, prompt: Usage | None) -> AnswerStream:
        """Begin a streamed answer; ``prompt`` has the prompt's token counts if they are known."""
        return AnswerStream(self.hides_usage)

    def whole(self, body: bytes) -> bytes:
        """Translate the engine's JSON of a whole answer into the body for the client."""
        return body

    def refusal(self, failure: Failure) -> Response:
        """Return the response to a request that the engine refused."""
        return failure.response()

    def sign_of_life(self) -> bytes:
        """Return the dialect's keep-alive event; b"" if it has none."""
        return b""
