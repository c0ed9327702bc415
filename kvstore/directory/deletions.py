"""The deletions that a server knows: for each session the epoch of its latest one.

Epochs are a logical clock: each deletion has a higher epoch than all seen before, and a session
keeps the clock's reading from when it began. So a deletion removes the sessions that began before
it, and a late, repeated or replayed one removes no session that began after it. Times of different
machines are never compared.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

MARK_BYTES: Final = 16
TENANT_BYTES: Final = 4  # the first of a mark: the same for all sessions of a tenant
MAX_DELETIONS: Final = 40_000
MAX_OF_TENANT: Final = 10_000
_ENTRY: Final = struct.Struct(f">{MARK_BYTES}sQ")
MAX_BYTES: Final = MAX_DELETIONS * _ENTRY.size
_MAX_EPOCH: Final = 1 << 62


class Deletions:
    """Epochs by mark (``names.Names.mark``); of a tenant with too many the oldest are dropped."""

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


def unpack(packed: bytes | memoryview) -> Iterator[tuple[bytes, int]]:
    """Read the output of ``Deletions.pack``: marks and epochs."""
    whole = len(packed) - len(packed) % _ENTRY.size
    yield from _ENTRY.iter_unpack(memoryview(packed)[:whole])
