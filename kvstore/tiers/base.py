"""The protocol between the store and a place that stores blobs.

A tier keeps immutable, non-empty blobs by key inside a byte budget. It does not know sessions. It
only knows the place of a blob in its chain, since the store passes the key before it. A chain is
evicted from its end, and a beginning that many sessions share goes last (``return_order``).

Methods are synchronous and thread-safe; the store calls them from its own threads. Any call may
fail, and the store treats a failure as a miss. A tier copies a blob that it is given before the
call returns; the caller must not change a blob that a tier returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from kvstore.session import TIERS, TenantLimits, TierName

# "budget": the tier needed the space. "limit": the tenant held more than it may.
EvictionCause: TypeAlias = Literal["budget", "limit"]
Blob = bytes | bytearray | memoryview


class TierStats(msgspec.Struct, frozen=True):
    """The statistics of one tier at one moment. ``evictions`` and ``errors`` only grow.

    For a shared server they are the server's numbers, which count the data of all its clients.
    """

    name: TierName
    nbytes: int  # keys, blobs and the tier's own overhead per blob
    capacity_bytes: int  # 0 = no bound is known
    num_blobs: int
    evictions: int
    errors: int
    available: bool  # it answers; False until the first answer and while a breaker is open
    trouble: str = ""  # why the medium may hold too much, or refuse to store; "" = no trouble
    profile_bytes: int = 0  # the part of ``nbytes`` that profiles of codecs take

    @classmethod
    def joined(cls, tiers: Sequence[TierStats], *, available: bool) -> TierStats:
        """Return the statistics of one kind of tier in several engines together.

        They are added up, except those of a shared server, which every engine reports alike.
        """
        joins = max if TIERS[tiers[0].name].is_shared else sum
        names = ("nbytes", "capacity_bytes", "num_blobs", "evictions", "profile_bytes")
        joint = {name: joins(getattr(x, name) for x in tiers) for name in names}
        errors = sum(x.errors for x in tiers)
        trouble = next((x.trouble for x in tiers if x.trouble), "")
        return cls(tiers[0].name, **joint, errors=errors, available=available, trouble=trouble)


class Tier(Protocol):
    """Immutable blobs by key inside a bound; every method may be called on any thread.

    A shared server has its own bound and eviction policy: it knows neither pins nor tenants.
    """

    @property
    def name(self) -> TierName:
        """The kind of tier: ``ram``, ``disk`` or ``redis``."""

    @property
    def owed_file(self) -> Path | None:
        """The file for deletions that wait until this tier answers.

        None: they are lost when the process ends.
        """

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        """Return one blob per key, ``None`` for a miss. Does not count as a use (``touch``).

        Raises:
            TierUnavailable: nothing could be read (not for a plain miss).
        """

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        """Store blobs of one chain, evicting others; return how many of the keys are now held.

        A key that exists keeps its blob. Each blob is written whole or not at all. The first blob
        that does not fit beside those before it in its chain is refused, and so are all after it.
        Never raises for lack of space.

        Args:
            items: keys and blobs, in the order of the chain.
            owner: the tenant to whose limit they count; "" = not known.
            after: the key before them in the chain. If it is not held, they are refused, since
                nothing can be restored beyond a hole; b"" = they are its beginning.

        Raises:
            TierUnavailable: nothing could be written.
        """

    def replace(self, key: bytes, blob: Blob, owner: str = "", after: bytes = b"") -> bool:
        """Store a blob in place of the key's older one; return False if it is refused.

        After a refusal the older blob may still exist, as the next to be evicted.

        Args:
            after: for a record, the last key of its session's chain, with which it is evicted.

        Raises:
            TierUnavailable: nothing could be written.
        """

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is held now. A blob may be evicted right after.

        Raises:
            TierUnavailable: a server did not answer.
        """

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the length of each key's blob without reading it, ``None`` for a miss.

        Raises:
            TierUnavailable: a server did not answer, or nothing could be read.
        """

    def own(self, owner: str, keys: Sequence[bytes]) -> None:
        """Assign blobs that have no owner to a tenant; absent keys are ignored.

        After a restart the store calls this for each session, the longest unused first, with its
        keys in the order of the chain.
        """

    def limit_tenants(self, limits: TenantLimits) -> dict[str, int] | None:
        """Set the limits of tenants from now on; return the bytes of each tenant that has one.

        A tenant beyond its limit loses its least recent blobs now, pinned ones last. Returns None,
        and does nothing, if the tier does not know the bytes of tenants.

        Raises:
            TierUnavailable: the limits are set, but blobs beyond them may still exist.
        """

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        """Mark a chain as just used. A restore and the save after it count as one use.

        Args:
            keys: the record's key, if there is a record, then all keys of the chain in order.
            restored: whether the chain was restored; otherwise it was saved.
        """

    def pin(self, key: bytes, pinned: bool) -> None:
        """Pin a session, by its record's key, or another blob: it is evicted last. Or unpin it.

        The pin of a key that is not held is remembered for a later blob.
        """

    def delete_many(self, keys: Iterable[bytes]) -> int:
        """Delete blobs; return how many of the keys were held.

        Raises:
            TierUnavailable: they may still exist.
        """

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """Yield keys that start with ``prefix`` and their blobs, in key order. Only for records.

        Raises:
            TierUnavailable: the rest cannot be listed or read.
        """

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        """Return for each key why this process evicted it; None: it did not, or long ago."""

    def stats(self) -> TierStats:
        """Return the current statistics. Never raises, never waits for the medium."""

    def flush(self) -> None:
        """Wait until everything accepted so far is as durable as the medium makes it.

        Raises:
            TierUnavailable: the medium failed.
        """

    def close(self) -> None:
        """Release the medium; later calls may raise ``TierUnavailable``."""
