"""Rows of the directory: one for each session that a server has, in pages of one tenant.

A page is sealed for its tenant, its server and its number (``names``), so that no program on the
same Redis without the secret can read it, change it, or move it to another place.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

import msgspec

from kvstore.session import TierName

NUM_PAGES: Final = 16  # of one tenant at one server
MAX_PAGE_ROWS: Final = 640
MAX_PAGE_BYTES: Final = 512 << 10


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One session of a tenant at one server."""

    model: str
    id: str
    epoch: int  # of the deletions known when the session began; a later deletion removes it
    used: float  # seconds of the Redis server's clock
    state: str
    tier: TierName | None
    tokens: int
    nbytes: int
    pinned: bool
    kind: str = "main"
    parent: str | None = None
    retain_s: float = 0.0


_decoder = msgspec.msgpack.Decoder(list[Row])


def page_of(session_id: str) -> int:
    """Return the number of the page that holds a session."""
    return crc32(session_id.encode()) % NUM_PAGES


def pack(rows: list[Row]) -> bytes:
    """Write a page, the latest used rows first; those beyond its bounds are left out."""
    rows = sorted(rows, key=lambda x: -x.used)[:MAX_PAGE_ROWS]
    while len(page := msgspec.msgpack.encode(rows)) > MAX_PAGE_BYTES:
        del rows[len(rows) // 2 :]
    return page


def unpack(page: bytes | memoryview) -> list[Row]:
    """Read a page that was sealed; a page of another release yields no rows."""
    try:
        return _decoder.decode(page)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
