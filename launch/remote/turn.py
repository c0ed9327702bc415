"""Takes one streamed turn on an OpenAI-compatible server, and measures its times."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import aiohttp
import msgspec

from engines.http import CACHE_HEADER, SESSION_HEADER, CacheOutcome
from launch.remote.server import Address, content_of, reason_of, words_of

MOST_BYTES = 8 << 20  # of one event
_PIECE_BYTES = 64 << 10
PATH: Final = "/v1/chat/completions"
UNKNOWN: Final = "unknown"
CACHED: Final = "cached"  # KV was reused, but the server does not say from where
MISS: Final = "miss"
MOST_CHARACTERS: Final = 1 << 20  # of an answer
MOST_GAPS: Final = 4096  # times between chunks that are recorded of an answer
ERROR_BYTES: Final = 64 << 10
Message = Mapping[str, Any]


class NotEvents(ValueError):
    """The answer is not a valid stream of events; the message says why."""


async def data_of(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream, which OpenAI servers write in one line.

    Raises:
        NotEvents: an event is larger than ``MOST_BYTES``.
    """
    rest = b""
    async for piece in content.iter_chunked(_PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MOST_BYTES:
            raise NotEvents(f"an event of more than {MOST_BYTES >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
    if rest.startswith(b"data:"):
        yield rest.removeprefix(b"data:").strip()


class RemoteTurn(msgspec.Struct):
    """One turn as its client saw it. Times are in seconds; None = not measured."""

    status: int = 0  # of HTTP; 0 = no answer
    error: str = ""
    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = []  # between chunks of the answer
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    answer_tokens: int = 0
    source: str = UNKNOWN  # where the prompt's KV came from
    reason: str = ""  # why no more of it was reused
    judged_by: str = ""  # where ``source`` was found: "header", "usage", or "" = nowhere
    session: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error


async def take_turn(
    http: aiohttp.ClientSession,
    address: Address,
    model: str,
    messages: Sequence[Message],
    *,
    session: str = "",
    max_tokens: int = 0,
    fields: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    on_text: Callable[[str], None] | None = None,
) -> RemoteTurn:
    """Take one turn and return it. An error is stored in ``RemoteTurn.error``, never raised.

    Args:
        session: sent as ``X-Session-ID``, which other servers ignore.
        max_tokens: the most tokens of the answer; 0 = the server's own limit.
        fields: further fields of the request's body.
        on_text: called with each piece of the answer's text.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"max_tokens": max_tokens} if max_tokens else {}),
        **(fields or {}),
    }
    headers = address.headers | ({"x-session-id": session} if session else {})
    turn, began = RemoteTurn(), time.perf_counter()
    try:
        async with http.post(
            address.base + PATH,
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10),
        ) as answer:
            await _take(turn, answer, began, on_text)
    except TimeoutError:
        turn.error = f"no end of the answer within {timeout_s:g} s"
    except NotEvents as error:
        turn.error = f"the answer is no stream of events: {error}"
    except (aiohttp.ClientError, OSError) as error:
        turn.error = f"the connection failed: {reason_of(error)}"
    turn.total_s = time.perf_counter() - began
    return turn


async def _take(
    turn: RemoteTurn,
    answer: aiohttp.ClientResponse,
    began: float,
    on_text: Callable[[str], None] | None,
) -> None:
    turn.status = answer.status
    turn.session = unquote(answer.headers.get(SESSION_HEADER, ""))
    outcome = CacheOutcome.parse(answer.headers.get(CACHE_HEADER, ""))
    if outcome is not None:
        turn.source, turn.reason, turn.judged_by = outcome.source, outcome.reason or "", "header"
        turn.cached_tokens = outcome.cached_tokens
    if answer.status != 200:
        turn.error = words_of(content_of(await answer.content.read(ERROR_BYTES)))
        return
    reader = _AnswerReader(turn, began, on_text)
    done = False
    async for data in data_of(answer.content):
        if done := data == b"[DONE]":
            break
        reader.take(data)
        if turn.error:
            return
    if not done and not reader.finished:
        turn.error = "the answer was cut off"
    turn.answer_tokens = turn.answer_tokens or reader.num_pieces
    if not turn.judged_by and turn.cached_tokens is not None:
        turn.source, turn.judged_by = (CACHED if turn.cached_tokens else MISS), "usage"


class _AnswerReader:
    """Reads the chunks of one answer into its ``RemoteTurn``."""

    def __init__(
        self, turn: RemoteTurn, began: float, on_text: Callable[[str], None] | None
    ) -> None:
        self.finished = False
        self.num_pieces = 0
        self._turn, self._began, self._on_text = turn, began, on_text
        self._last: float | None = None

    def take(self, data: bytes) -> None:
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise NotEvents(str(error)) from error
        if not isinstance(chunk, dict):
            raise NotEvents("a chunk is no object")
        if chunk.get("error"):
            self._turn.error = words_of(chunk)
            return
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage(usage)
        for choice in chunk.get("choices") or ():
            if isinstance(choice, dict):
                self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        said = delta.get("content") or ""
        other = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        self.finished = self.finished or bool(choice.get("finish_reason"))
        if said or other:
            self._time()
            self.num_pieces += 1
        elif self.finished and self._turn.ttft_s is None:  # an empty answer: its end comes first
            self._time()
        if said:
            room = MOST_CHARACTERS - len(self._turn.text)
            self._turn.text += said[:room]
            if self._on_text is not None:
                self._on_text(said)

    def _time(self) -> None:
        now = time.perf_counter()
        if self._last is None:
            self._turn.ttft_s = now - self._began
        elif len(self._turn.gaps_s) < MOST_GAPS:
            self._turn.gaps_s.append(now - self._last)
        self._last = now

    def _usage(self, usage: Mapping[str, Any]) -> None:
        turn = self._turn
        turn.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        turn.answer_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            turn.cached_tokens = details["cached_tokens"]
