"""Unpacks bodies that clients send in gzip, deflate or zstd, within a bound on what comes out.

A few bytes can unpack to gigabytes. So no more than a step is unpacked before it is counted, the
memory that a zstd frame asks for is bounded, and one body is unpacked at a time: together they take
no more memory than the bodies that come out, and streams go on between two steps.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from engines.http import body_too_large
from engines.openai.errors import InvalidRequest
from gateway.errors import Failure, RequestRefused

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENCODINGS: Final = ("gzip", "deflate", "zstd")
STEP_BYTES: Final = 256 << 10  # unpacked in well under a millisecond
FEED_BYTES: Final = 64 << 10  # zlib copies what it has not taken yet, at each step
MAX_WINDOW_LOG: Final = 23  # 8 MiB, the most that RFC 9659 lets a client of HTTP ask for


def encoding_of(declared: str) -> str:
    """Return the encoding of a body whose ``Content-Encoding`` is ``declared``; "" if it has none.

    Raises:
        Refused: 415, it is another than ``ENCODINGS``, or there are several.
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
        on_more: called with the bytes of each piece; what it raises ends the work.

    Raises:
        InvalidRequest: 413, it unpacks to more than ``max_bytes``; 400, it is not of that encoding.
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
    """One stream that is unpacked; both libraries have this in common."""

    @property
    def eof(self) -> bool:
        """True once the stream has ended."""

    @property
    def unused_data(self) -> bytes:
        """The bytes that came after that end."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return the next bytes, ``max_length`` at most."""


def _pieces(body: bytes, encoding: str) -> Iterator[bytes]:
    """Yield what comes out, in pieces of at most ``STEP_BYTES``; some may be empty."""
    unpacker = _unpacker(encoding, body)
    for start in range(0, len(body), FEED_BYTES):
        if unpacker.eof:
            raise InvalidRequest(f"The body goes on after the end of its {encoding} stream.")
        given = body[start : start + FEED_BYTES]
        while not unpacker.eof:
            piece = unpacker.decompress(given, STEP_BYTES)
            yield piece
            # zstd keeps what it has not taken, zlib hands it back.
            given = getattr(unpacker, "unconsumed_tail", b"")
            if not given and len(piece) < STEP_BYTES:
                break
    if not unpacker.eof:
        raise InvalidRequest(f"The body's {encoding} stream ends too early.")
    if unpacker.unused_data:
        raise InvalidRequest(f"The body goes on after the end of its {encoding} stream.")


def _unpacker(encoding: str, body: bytes) -> _Unpacker:
    if encoding == "zstd":
        option = zstd.DecompressionParameter.window_log_max
        return zstd.ZstdDecompressor(options={option: MAX_WINDOW_LOG})
    if encoding == "gzip":
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    # With zlib's head, as RFC 9110 has it, or without, as some clients send it.
    has_head = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return zlib.decompressobj(wbits=zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)
