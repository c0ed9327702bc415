"""The seam between the store and a place where blobs rest.

A tier keeps immutable blobs by key inside a byte budget. It knows nothing of sessions: the store
calls ``touch`` with a session's keys in chain order, and the tier makes the *first* of them the
most recently used. Plain least-recently-used eviction then takes a session's tail before its
head, and a prefix that many sessions share last.

Methods are synchronous and thread-safe; the store calls them from its own threads. Everything
here may fail, and every failure is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

Blob = bytes | bytearray | memoryview


class TierStats(msgspec.Struct, frozen=True):
    name: str
    nbytes: int  # keys, blobs and what the tier itself needs per blob
    capacity_bytes: int
    num_blobs: int
    evictions: int
    errors: int
    available: bool  # it answers; False until the first answer and while a breaker is open


class Tier(Protocol):
    @property
    def name(self) -> str:
        """``ram``, ``disk`` or ``redis``."""

    @property
    def persistent(self) -> bool:
        """True if blobs survive the end of this process."""

    @property
    def overhead_bytes(self) -> int:
        """Of the budget: what a blob takes besides its own bytes, key included; at most."""

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        """One entry per key, ``None`` for a miss. Does not touch.

        Raises:
            TierUnavailable: nothing could be read (not for a plain miss).
        """

    def put_many(self, items: Sequence[tuple[bytes, Blob]]) -> int:
        """Keep these blobs of one chain, evicting others; how many of their keys are now held.

        Blobs of an existing key are left as they are. All or nothing per blob. All keys become
        recent, the first one most. A blob that cannot fit beside what is pinned and what the same
        call brought before is refused. Never raises for want of room.

        Raises:
            TierUnavailable: nothing could be written.
        """

    def replace(self, key: bytes, blob: Blob) -> bool:
        """Like ``put_many`` for one blob, but a newer value wins (records and tails).

        False: refused; an older value may still be there, as the next to be evicted.
        """

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """A hint: a blob may vanish right after."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just used; ``keys[0]`` becomes the most recent of all."""

    def pin(self, keys: Iterable[bytes]) -> None:
        """Exempt from eviction until ``unpin``. Counted per key; unknown keys are remembered."""

    def unpin(self, keys: Iterable[bytes]) -> None: ...

    def delete_many(self, keys: Iterable[bytes]) -> int:
        """Remove for good (content too, as far as the medium allows); how many were there."""

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """All blobs whose key starts with ``prefix``, in key order; for session records only."""

    def stats(self) -> TierStats: ...

    def flush(self) -> None:
        """Return when everything accepted so far is as safe as it will get."""

    def close(self) -> None: ...
