r"""Bodies of requests: counted in bytes, unpacked, weighed and parsed, each within a bound.

The budget of all bodies counts received bytes, not the declared length. A turn's body counts until
it is handed to the engine: while it waits in line, but not while the engine computes. The body of
any other question to the engine counts until it is answered. Stored objects that a request refers
to count like its body. The bodies of one tenant never take the whole budget.

A few bytes can unpack to gigabytes. So at most ``STEP_BYTES`` are unpacked before they are counted,
the memory that a zstd frame asks for is bounded, and one body is unpacked at a time. A body of tiny
values takes many times its bytes once parsed. So large bodies are parsed one after the other, and
their size in memory is estimated before that.

A program that cuts text by UTF-16 units cuts some characters in two, and writes one half as
``\ud83d``: a lone surrogate, which is no text. Clients send tool calls and their results again with
every later turn, so refusing them would end the conversation: there a surrogate is replaced.
Anywhere else it is refused.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from engines.http import body_too_large
from engines.openai.errors import InvalidRequest
from engines.openai.messages import without_halves
from engines.openai.requests import Json, parse_json
from gateway.errors import Failure, RequestRefused

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LARGE_BODY_BYTES = 256 << 10  # some milliseconds of work
# The most that a parsed body may weigh, in units of about 64 bytes: a number or a text is 1.
MAX_WEIGHT = 1 << 20
_WEIGHTS = {b",": 1, b"[": 4, b"{": 8}
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_FULL = Failure(
    503, "This server is reading too many bodies. Try again later.", None, "bodies_full", 1.0
)
ENCODINGS: Final = ("gzip", "deflate", "zstd")
STEP_BYTES: Final = 256 << 10  # unpacked in well under a millisecond
FEED_BYTES: Final = 64 << 10  # given to zlib at once, which copies its unused input at each step
MAX_STREAMS: Final = 4096  # of one body: an empty stream takes time, but adds no bytes
MAX_WINDOW_LOG: Final = 23  # 8 MiB, the most that RFC 9659 lets a client of HTTP ask for
REPLACED_HEADER: Final = "x-thermocline-replaced"
_REPLACEMENT: Final = "\ufffd".encode()
_HINT: Final = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Matches each escape as a whole, so that the second half of an escaped backslash begins none.
_ESCAPE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # both halves
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf])"
    rb"|\\.",
    re.DOTALL,
)
_LISTS: Final = ("messages", "input", "items")  # where they are, in each dialect
_ARGUMENTS: Final = ("arguments", "input")  # of a call: OpenAI's functions and custom tools
# Suffixes of the types of items with other fields; some calls have their results in them.
_ITEMS: Final = ("_call", "mcp_list_tools")
_NAMES: Final = frozenset({"type", "id", "call_id", "name", "server_label"})  # of a call's fields
# Suffixes of the types of Anthropic's blocks (``server_tool_use``), and the field of each.
_BLOCKS: Final = {"tool_result": "content", "tool_use": "input"}


class BodyBudget:
    """The bytes of all bodies that are held at once. Runs on the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_of_one = max_bytes - max_bytes // 4  # of one tenant: a quarter is for the others
        self._of: Counter[str] = Counter()  # bytes of each tenant
        self.parsing = asyncio.Semaphore(1)  # held while a large body is parsed
        self.unpacking = asyncio.Semaphore(1)  # held while a body is unpacked
        self.nbytes = 0

    def take(self, tenant: str, nbytes: int) -> None:
        """Count received bytes. Raises ``RequestRefused`` (503) if there is no room for them."""
        if self.nbytes + nbytes > self._max_bytes or self._of[tenant] + nbytes > self._max_of_one:
            raise RequestRefused(_FULL)
        self.nbytes += nbytes
        self._of[tenant] += nbytes

    def give_back(self, tenant: str, nbytes: int) -> None:
        """Release bytes that ``take`` has counted."""
        self.nbytes -= nbytes
        self._of[tenant] -= nbytes
        if not self._of[tenant]:
            del self._of[tenant]


class BodyShare:
    """The bytes of the budget that one request holds."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._nbytes = 0
        self.tenant = ""  # the owner of the body; set before the first byte is read

    def grow(self, nbytes: int) -> None:
        """Raise the share to ``nbytes`` if it is smaller. Raises ``RequestRefused`` (503)."""
        if nbytes > self._nbytes:
            self._budget.take(self.tenant, nbytes - self._nbytes)
            self._nbytes = nbytes

    def add(self, nbytes: int) -> None:
        """Raise the share by ``nbytes``. Raises ``RequestRefused`` (503)."""
        self.grow(self._nbytes + nbytes)

    def give_back(self) -> None:
        """Release the share, once the body was answered or handed on. May be called twice."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget.give_back(self.tenant, nbytes)


def check_weight(*bodies: bytes, what: str = "The body") -> None:
    """Refuse large JSON that would take too much memory once it is parsed.

    Args:
        what: the subject of the error's sentence.

    Raises:
        InvalidRequest: 400, the JSON has too many values.
    """
    if sum(map(len, bodies)) <= LARGE_BODY_BYTES or sum(map(_weight, bodies)) <= MAX_WEIGHT:
        return
    if sum(_weight(_TEXTS.sub(b"", x)) for x in bodies) > MAX_WEIGHT:  # without marks in texts
        raise InvalidRequest(f"{what} has too many values.", code="too_many_values")


def _weight(body: bytes) -> int:
    return sum(body.count(mark) * weight for mark, weight in _WEIGHTS.items())


# ---- unpacking


def encoding_of(declared: str) -> str:
    """Return the encoding of a body whose ``Content-Encoding`` is ``declared``; "" if it has none.

    Raises:
        RequestRefused: 415, the encoding is not in ``ENCODINGS``, or there are several.
    """
    names = [
        x for x in (y.strip().lower() for y in declared.split(",")) if x not in ("", "identity")
    ]
    if not names:
        return ""
    name = names[0].removeprefix("x-")  # x-gzip is gzip (RFC 9110)
    if len(names) > 1 or name not in ENCODINGS:
        accepted = ", ".join(ENCODINGS)
        message = f"Send the body in one of these encodings, or in none: {accepted}."
        raise RequestRefused(Failure(415, message, headers=(("accept-encoding", accepted),)))
    return name


async def unpacked(
    body: bytes, encoding: str, max_bytes: int, on_more: Callable[[int], None]
) -> bytes:
    """Unpack a whole body.

    Args:
        on_more: called with the number of bytes of each piece; may raise to stop the unpacking.

    Raises:
        InvalidRequest: 413, it unpacks to more than ``max_bytes``; 400, it is not in that encoding.
    """
    pieces: list[bytes] = []
    nbytes = 0
    try:
        for piece in _pieces(body, encoding):
            if pieces:
                await asyncio.sleep(0)
            nbytes += len(piece)
            if nbytes > max_bytes:
                raise body_too_large(max_bytes)
            on_more(len(piece))
            pieces.append(piece)
    except (zlib.error, zstd.ZstdError) as error:
        raise InvalidRequest(f"The body is not in {encoding}: {error}.") from error
    return b"".join(pieces)


class _Unpacker(Protocol):
    """The decompressor of one stream: what those of zlib and zstd have in common."""

    @property
    def eof(self) -> bool:
        """True once the stream has ended."""

    @property
    def unused_data(self) -> bytes:
        """The bytes after the end of the stream."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return the next bytes, ``max_length`` at most."""


def _pieces(body: bytes, encoding: str) -> Iterator[bytes]:
    """Yield the unpacked body in pieces of at most ``STEP_BYTES``; some may be empty.

    A body may be several streams of gzip or zstd in a row (RFC 1952, 2.2; RFC 8878, 3.1). Zeros
    after the last stream are padding, as for gzip(1).
    """
    unpacker, num_streams = _unpacker(encoding, body), 1
    end = len(body.rstrip(b"\0") if encoding == "gzip" else body)
    for start in range(0, len(body), FEED_BYTES):
        given = body[start : start + FEED_BYTES]
        while True:
            if unpacker.eof:
                if min(start + FEED_BYTES, len(body)) - len(given) >= end:
                    return
                num_streams += 1
                if num_streams > (1 if encoding == "deflate" else MAX_STREAMS):
                    raise InvalidRequest(
                        f"The body goes on after the end of its {encoding} stream."
                    )
                unpacker = _unpacker(encoding, given)
            piece = unpacker.decompress(given, STEP_BYTES)
            yield piece
            if unpacker.eof:
                given = unpacker.unused_data
            else:  # zstd keeps its unused input, zlib hands it back
                given = getattr(unpacker, "unconsumed_tail", b"")
            if not given and (unpacker.eof or len(piece) < STEP_BYTES):
                break
    if not unpacker.eof:
        raise InvalidRequest(f"The body's {encoding} stream ends too early.")


def _unpacker(encoding: str, body: bytes) -> _Unpacker:
    if encoding == "zstd":
        option = zstd.DecompressionParameter.window_log_max
        return zstd.ZstdDecompressor(options={option: MAX_WINDOW_LOG})
    if encoding == "gzip":
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    # Deflate: with zlib's header, as RFC 9110 says, or without, as some clients send it.
    has_head = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return zlib.decompressobj(wbits=zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)


# ---- lone surrogates


class WholeText(NamedTuple):
    """A parsed body, and how many lone surrogates were replaced in it."""

    json: Json
    num_replaced: int = 0


def parse_whole(body: bytes) -> WholeText:
    """Parse a body as ``parse_json`` does; replace lone surrogates in tool calls and results.

    Raises:
        InvalidRequest: it is no JSON, or has a lone surrogate elsewhere: the error names the field.
    """
    if not _HINT.search(body):
        return WholeText(parse_json(body))
    with suppress(InvalidRequest):
        raw = parse_json(body)
        return WholeText(raw, _mend_arguments(raw))
    mark = f"\ufdd0{secrets.token_hex(2)[:3]}".encode()  # in no text; as long as an escape
    marked = _ESCAPE.sub(lambda x: mark if x["half"] else x[0], body)
    raw = parse_json(marked)
    num_replaced = sum(_mend(of, name, mark) for of, name in _of_tools(raw))
    num_replaced += _mend_arguments(raw)
    for name, value in raw.items():
        rows = enumerate(value) if isinstance(value, list) else ()
        parts = [(f"{name}[{i}]", x) for i, x in rows] or [(name, value)]
        for where, part in parts:
            if mark in msgspec.json.encode([name, part]):
                raise _half(where if mark.decode() not in where else "")
    return WholeText(raw, num_replaced)


def _of_tools(raw: Json) -> Iterator[tuple[Json, str]]:
    """Yield the fields with tool calls and results: each an object and the field's name."""
    for row in _rows(raw):
        kind, content = row.get("type"), row.get("content")
        yield from _calls_in(row)
        if isinstance(kind, str) and kind.endswith("_call_output"):
            yield row, "output"
        elif isinstance(kind, str) and kind.endswith(_ITEMS):
            yield from ((row, name) for name in row if name not in _NAMES)
        elif row.get("role") in ("tool", "function"):
            yield row, "content"
        elif isinstance(content, list):
            blocks = [x for x in content if isinstance(x, dict)]
            for end, name in _BLOCKS.items():
                yield from ((x, name) for x in blocks if str(x.get("type")).endswith(end))


def _rows(raw: Json) -> list[Json]:
    rows = [x for name in _LISTS if isinstance(raw.get(name), list) for x in raw[name]]
    return [x for x in rows if isinstance(x, dict)]


def _calls_in(row: Json) -> Iterator[tuple[Json, str]]:
    """Yield the fields with a call's arguments: each an object and the field's name."""
    calls = row.get("tool_calls")
    of_chats = [x for x in calls if isinstance(x, dict)] if isinstance(calls, list) else []
    for call in (row, row.get("function_call"), *(y for x in of_chats for y in x.values())):
        if isinstance(call, dict):
            yield from ((call, name) for name in _ARGUMENTS if name in call)


def _mend_arguments(raw: Json) -> int:
    """Replace lone surrogates in functions' arguments, which are JSON in a string; count them."""
    num = 0
    for call, name in (x for row in _rows(raw) for x in _calls_in(row)):
        if name == "arguments" and isinstance(text := call[name], str):
            call[name], more = without_halves(text)
            num += more
    return num


def _mend(of: Json, name: str, mark: bytes) -> int:
    """Replace the marks in a field by U+FFFD; return their number."""
    value: Any = of.get(name)
    written = msgspec.json.encode(value)
    num = written.count(mark)
    if num:
        of[name] = msgspec.json.decode(written.replace(mark, _REPLACEMENT))
    return num


def _half(where: str) -> InvalidRequest:
    message = (
        r"it has half a character (a lone surrogate such as \ud83d): leave it out, or send the"
        " whole character"
    )
    return InvalidRequest(f"{where or 'The body'}: {message}.", where or None)
