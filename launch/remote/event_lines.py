"""Reads server-sent events out of an answer's bytes, within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp

MOST_BYTES = 8 << 20  # of one event
_PIECE_BYTES = 64 << 10


class NotEvents(ValueError):
    """The answer is no stream of events; the message says why."""


class Event(NamedTuple):
    """One event; ``name`` is ``message`` where the server names none."""

    name: str
    data: bytes
    id: str


async def events_of(content: aiohttp.StreamReader) -> AsyncIterator[Event]:
    """Yield the events of a stream until it ends; comments are left out.

    Raises:
        NotEvents: an event is larger than ``MOST_BYTES``.
    """
    rest = b""
    lines: list[bytes] = []
    async for piece in content.iter_chunked(_PIECE_BYTES):
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) + sum(map(len, lines)) > MOST_BYTES:
            raise NotEvents(f"an event of more than {MOST_BYTES >> 20} MiB")
        for line in whole:
            line = line.removesuffix(b"\r")
            if line:
                lines.append(line)
            elif lines:
                if (event := _event(lines)) is not None:
                    yield event
                lines = []
    if lines and (event := _event(lines)) is not None:
        yield event


def _event(lines: list[bytes]) -> Event | None:
    name, number, data = "message", "", []
    for line in lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"id":
            number = value.decode("utf-8", "replace")
    return Event(name, b"\n".join(data), number) if data else None
