"""The entries of the directory: rows of sessions, deletions, and the names and seals of both.

A page is sealed for its tenant, its server and its number (``Names``), so that no program on the
same Redis without the secret can read it, change it, or move it to another place.

Epochs are a logical clock: each deletion has a higher epoch than all seen before, and a session
keeps the clock's reading from when it began. So a deletion removes the sessions that began before
it, and a late, repeated or replayed one removes no session that began after it. Times of different
machines are never compared.

thermocline:directory:1:{KEY}:board:SEAT             16 bytes of header | a sealed ``boards.Board``
                             :deletions:LIFE         sealed ``Deletions``
                             :rows:LIFE:TENANT:PAGE  a sealed page of ``Row``

KEY identifies the servers' common secret without revealing it, so servers of other secrets never
meet; its braces keep all keys in one slot of a cluster. TENANT is a keyed hash. Values are
encrypted with AES-256-GCM, with a key of the tenant or, for boards and deletions, of the servers,
and the name is bound in.
"""

from __future__ import annotations

import hmac
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

from kvstore.session import TierName
from kvstore.tiers.seal import Seal

NUM_PAGES: Final = 16  # of one tenant at one server
MAX_PAGE_ROWS: Final = 640
MAX_PAGE_BYTES: Final = 512 << 10
MARK_BYTES: Final = 16
TENANT_BYTES: Final = 4  # the first of a mark: the same for all sessions of a tenant
MAX_DELETIONS: Final = 40_000
MAX_OF_TENANT: Final = 10_000
_ENTRY: Final = struct.Struct(f">{MARK_BYTES}sQ")
MAX_BYTES: Final = MAX_DELETIONS * _ENTRY.size
_MAX_EPOCH: Final = 1 << 62
# Makes a key from a tenant's name and a purpose, with the servers' common secret.
KeyOf: TypeAlias = Callable[[str, bytes], bytes]
NUM_SEATS: Final = 32  # servers on one Redis that share a secret


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


def rows_of(page: bytes | memoryview) -> list[Row]:
    """Read a page that was sealed; a page of another release yields no rows."""
    try:
        return _decoder.decode(page)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


class Deletions:
    """Epochs by mark (``Names.mark``); of a tenant with too many the oldest are dropped."""

    def __init__(self) -> None:
        self.clock = 0  # the highest epoch that was seen
        self._tenants: dict[bytes, OrderedDict[bytes, int]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def see(self, epoch: int) -> None:
        """Advance the clock to at least this epoch."""
        self.clock = max(self.clock, min(epoch, _MAX_EPOCH))

    def add(self, mark: bytes, epoch: int) -> bool:
        """Record a deletion; returns False if that or a later one was known."""
        self.see(epoch)
        marks = self._tenants.setdefault(mark[:TENANT_BYTES], OrderedDict())
        known = marks.get(mark)
        if known is not None and known >= epoch:
            return False
        self._num += known is None
        marks[mark] = epoch
        marks.move_to_end(mark)
        if len(marks) > MAX_OF_TENANT:
            self._drop_oldest(marks)
        while self._num > MAX_DELETIONS:
            self._drop_oldest(max(self._tenants.values(), key=len))
        return True

    def _drop_oldest(self, marks: OrderedDict[bytes, int]) -> None:
        marks.popitem(last=False)
        self._num -= 1

    def epoch(self, mark: bytes) -> int:
        """Return the epoch of the latest deletion of a mark; 0 if none is known."""
        marks = self._tenants.get(mark[:TENANT_BYTES])
        return marks.get(mark, 0) if marks else 0

    def pack(self) -> bytes:
        """Write all deletions as bytes."""
        return b"".join(
            _ENTRY.pack(mark, epoch)
            for marks in self._tenants.values()
            for mark, epoch in marks.items()
        )


def deletions_in(packed: bytes | memoryview) -> Iterator[tuple[bytes, int]]:
    """Read the output of ``Deletions.pack``: marks and epochs."""
    whole = len(packed) - len(packed) % _ENTRY.size
    yield from _ENTRY.iter_unpack(memoryview(packed)[:whole])


class Names:
    """Names and seals, for all servers of one secret. Thread-safe."""

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        own = key_of("", b"directory of servers")
        self._seal = Seal(own, "directory", encrypt=True)
        self._marks = hmac.digest(own, b"marks", "sha256")
        self._prefix = f"thermocline:directory:1:{{{self._seal.key_name.hex()}}}"

    def board(self, seat: int) -> str:
        return f"{self._prefix}:board:{seat}"

    def deletions(self, life: bytes) -> str:
        return f"{self._prefix}:deletions:{life.hex()}"

    def rows(self, life: bytes, tenant: str, page: int) -> str:
        return f"{self._prefix}:rows:{life.hex()}:{self._hash(tenant)[:16].hex()}:{page}"

    def seal(self, tenant: str | None = None) -> Seal:
        """Return the seal of a tenant's pages; without a tenant the seal of all other values."""
        if tenant is None:
            return self._seal
        return Seal(self._key_of(tenant, b"directory:"), "directory", encrypt=True)

    def mark(self, tenant: str, model: str, session_id: str) -> bytes:
        """Return the hash that stands for a session; model "" is any model."""
        rest = MARK_BYTES - TENANT_BYTES
        return self._hash(tenant)[:TENANT_BYTES] + self._hash(tenant, model, session_id)[:rest]

    def engine(self, address: str) -> bytes:
        """Return the hash that stands for an engine that several servers use."""
        return self._hash("engine", address)[:8]

    def _hash(self, *words: str) -> bytes:
        said = b"".join(len(x.encode()).to_bytes(4, "big") + x.encode() for x in words)
        return hmac.digest(self._marks, said, "sha256")
