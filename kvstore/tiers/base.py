"""The protocol between the store and a place that stores blobs.

A tier keeps immutable blobs, none of them empty, by key inside a byte budget. It does not know
sessions, only the place of a blob in a chain: the store says after which key it comes. A chain is
evicted from its end, and a beginning that many sessions share last (``return_order``).

Methods are synchronous and thread-safe; the store calls them from its own threads. Everything
here may fail, and every failure is a miss. A blob that is handed in is copied before the call
returns; one that is handed out must not be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from kvstore.session import TIERS, TenantLimits, TierName

# "budget": there was no space for it. "limit": its tenant may hold no more.
EvictionCause: TypeAlias = Literal["budget", "limit"]
Blob = bytes | bytearray | memoryview


class TierStats(msgspec.Struct, frozen=True):
    """The numbers of one tier at one moment. Counters only grow.

    Those of a shared server are the server's own, with all that others keep there.
    """

    name: TierName
    nbytes: int  # keys, blobs and the tier's own overhead per blob
    capacity_bytes: int  # 0 = no bound is known
    num_blobs: int
    evictions: int
    errors: int
    available: bool  # it answers; False until the first answer and while a breaker is open
    trouble: str = ""  # why the medium may hold too much, or refuse to store
    profile_bytes: int = 0  # of these, the learned tables of codecs

    @classmethod
    def joined(cls, tiers: Sequence[TierStats], *, available: bool) -> TierStats:
        """Add up the numbers of one tier in several places; a shared server's are the same."""
        joins = max if TIERS[tiers[0].name].is_shared else sum
        names = ("nbytes", "capacity_bytes", "num_blobs", "evictions", "profile_bytes")
        joint = {name: joins(getattr(x, name) for x in tiers) for name in names}
        errors = sum(x.errors for x in tiers)
        trouble = next((x.trouble for x in tiers if x.trouble), "")
        return cls(tiers[0].name, **joint, errors=errors, available=available, trouble=trouble)


class Tier(Protocol):
    """Immutable blobs by key inside a bound; every method may be called on any thread.

    A shared server has its own bound and order of eviction: it knows neither pins nor tenants.
    """

    @property
    def name(self) -> TierName:
        """The kind of tier: ``ram``, ``disk`` or ``redis``."""

    @property
    def owed_file(self) -> Path | None:
        """The file for deletions that wait until this tier answers; None: they end with us."""

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        """Return one blob per key, ``None`` for a miss. Does not touch.

        Raises:
            TierUnavailable: nothing could be read (not for a plain miss).
        """

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        """Keep these blobs of one chain, evicting others; return how many of the keys are now held.

        A key that exists keeps its blob. Each blob is written whole or not at all. The first one
        that does not fit beside those before it in its chain is refused, with all after it. Never
        raises for lack of space.

        Args:
            after: the key before them in the chain. If it is not held, they are refused, since
                nothing can be restored beyond a hole; b"" = they are its beginning.

        Raises:
            TierUnavailable: nothing could be written.
        """

    def replace(self, key: bytes, blob: Blob, owner: str = "", after: bytes = b"") -> bool:
        """Keep a blob in place of the key's older one (records); False if refused.

        After a refusal the older blob may still exist, as the next to be evicted.

        Args:
            after: for a record, the last key of its session's chain, with which it stays.

        Raises:
            TierUnavailable: nothing could be written.
        """

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is held now; a hint, a blob may vanish right after.

        Raises:
            TierUnavailable: a server did not answer.
        """

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the length of each key's blob without reading it, ``None`` for a miss.

        Raises:
            TierUnavailable: a server did not answer, or nothing could be read.
        """

    def own(self, owner: str, keys: Sequence[bytes]) -> None:
        """Assign blobs without an owner to theirs; absent ones are ignored.

        Those that an earlier life left here come session by session, the longest unused first, each
        in the order of its chain.
        """

    def limit_tenants(self, limits: TenantLimits) -> dict[str, int] | None:
        """Hold tenants to these limits from now on; return the bytes of each that has one.

        A tenant beyond its limit loses its least recent blobs now, pinned ones last. None: what
        tenants hold here is not known, and nothing was done.

        Raises:
            TierUnavailable: the limits are set, but blobs beyond them may still exist.
        """

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        """Mark a chain as just restored, or else as just saved; a turn that does both is one use.

        ``keys``: its record, if it has one, then all of the chain in its order.
        """

    def pin(self, key: bytes, pinned: bool) -> None:
        """Evict the session of this record, or this single blob, only when nothing else is left.

        Or end that. A key without a blob is remembered, for a blob that comes later.
        """

    def delete_many(self, keys: Iterable[bytes]) -> int:
        """Remove blobs; return how many there were.

        Raises:
            TierUnavailable: they may still exist.
        """

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """Yield keys that start with ``prefix`` and their blobs, in key order; for records only.

        Raises:
            TierUnavailable: the rest cannot be listed or read.
        """

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        """Return for each key why this process evicted it; None: it did not, or too long ago."""

    def stats(self) -> TierStats:
        """Return the present numbers. Never raises, never waits for the medium."""

    def flush(self) -> None:
        """Return when everything accepted so far is as safe as it will get.

        Raises:
            TierUnavailable: it could not be made so.
        """

    def close(self) -> None:
        """Release the medium; later calls may raise ``TierUnavailable``."""
