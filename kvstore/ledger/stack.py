"""The tiers of one store, fastest first. A tier that fails counts as one that lacks the blob.

A tier is identified here by its level in the stack: 0 is the fastest. Tiers are inclusive: several
may hold the same blob, and the fastest copy is the one to read.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from kvstore.blobs.chain import CHUNK
from kvstore.errors import ForeignCodec, RefusedCodec, TierUnavailable, Unusable
from kvstore.session import NO_LIMITS, TIERS, MissReason, TenantLimits, TierName
from kvstore.stats import Counters
from kvstore.tiers.base import Blob, EvictionCause, Tier, TierStats

T = TypeVar("T")

_log = logging.getLogger(__name__)


class GoodCopy(NamedTuple, Generic[T]):
    """A copy of a blob that was accepted, the level of its tier, and what ``use`` returned."""

    blob: Blob
    level: int
    value: T


@dataclass(frozen=True)
class Located:
    """The level of the fastest tier that has each key; ``down``: some tier did not answer."""

    levels: list[int | None]
    down: bool

    @property
    def num_leading(self) -> int:
        """The number of keys before the first one that no tier has."""
        return self.levels.index(None) if None in self.levels else len(self.levels)


class TierStack:
    """Reads and writes blobs in all tiers. Thread-safe, as the tiers are.

    Only ``get`` raises ``TierUnavailable``; other methods count the failure and return as if the
    tier had nothing.
    """

    def __init__(self, tiers: Sequence[Tier], counters: Counters) -> None:
        self._tiers = tuple(tiers)
        self._counters = counters
        self._names: tuple[TierName, ...] = tuple(x.name for x in tiers)
        self._hiding = threading.Lock()
        self._hidden: list[set[bytes]] = [set() for _ in self._tiers]

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, fastest first, for tests."""
        return self._tiers

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def local(self) -> list[int]:
        """Levels of tiers that no other machine writes to."""
        return [i for i, name in enumerate(self._names) if not TIERS[name].is_shared]

    @property
    def shared(self) -> list[int]:
        return [i for i, name in enumerate(self._names) if TIERS[name].is_shared]

    @property
    def names(self) -> tuple[TierName, ...]:
        return self._names

    def name(self, i: int) -> TierName:
        return self._names[i]

    def level(self, name: TierName) -> int | None:
        return self._names.index(name) if name in self._names else None

    # ---- deletions that a tier has still to do

    def hide(self, i: int, keys: Iterable[bytes]) -> None:
        """Treat these blobs as absent in one tier, until they are written there again."""
        with self._hiding:
            self._hidden[i].update(keys)

    def show(self, i: int, keys: Iterable[bytes]) -> None:
        """End ``hide`` for these blobs, which were deleted or may be found again."""
        if hidden := self._hidden[i]:
            with self._hiding:
                hidden.difference_update(keys)

    def _unless_hidden(self, i: int, keys: Sequence[bytes], found: list[T], gone: T) -> list[T]:
        if not (hidden := self._hidden[i]):
            return found
        return [gone if key in hidden else x for key, x in zip(keys, found, strict=True)]

    # ---- blobs

    def get(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        """Read blobs from one tier; None for each that it lacks. Raises ``TierUnavailable``."""
        try:
            return self._unless_hidden(i, keys, self._tiers[i].get_many(keys), None)
        except TierUnavailable:
            self._count_down(i)
            raise

    def lengths(self, i: int, keys: Sequence[bytes]) -> list[int | None]:
        """Return the lengths of blobs without reading them; None for those that one tier lacks."""
        unknown: list[int | None] = [None] * len(keys)
        found = self._if_up(i, lambda: self._tiers[i].lengths(keys), unknown)
        return self._unless_hidden(i, keys, found, None)

    def nbytes(self, keys: Iterable[bytes]) -> int:
        """Add up the lengths of blobs, each in the fastest tier that has it."""
        missing, total = list(keys), 0
        for i in range(len(self) if missing else 0):
            lengths = self.lengths(i, missing)
            total += sum(x for x in lengths if x is not None)
            missing = [key for key, x in zip(missing, lengths, strict=True) if x is None]
        return total

    def find(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        try:
            return self.get(i, keys)
        except TierUnavailable:
            return [None] * len(keys)

    def holds(self, i: int, keys: Sequence[bytes]) -> list[bool]:
        held = self._if_up(i, lambda: self._tiers[i].contains_many(keys), [False] * len(keys))
        return self._unless_hidden(i, keys, held, False)

    def num_held(self, i: int, name_of: Callable[[int], bytes], num_chunks: int) -> int:
        """Return how many chunks, from the first on, a tier of this machine holds of a chain.

        Such a tier evicts a chain from its end, so a binary search finds the number.
        """

        def is_held(number: int) -> bool:
            return self.holds(i, [CHUNK + name_of(number)])[0]

        if num_chunks and is_held(num_chunks - 1):
            return num_chunks
        return bisect_left(range(num_chunks), True, key=lambda x: not is_held(x))

    def last_held(self, i: int, chain: Sequence[bytes]) -> bytes:
        """Return the last key of a chain that one tier holds; b"" = none."""
        if not chain or self.holds(i, chain[-1:])[0]:
            return chain[-1] if chain else b""
        held = self.holds(i, chain)
        return next((key for key, yes in zip(chain[::-1], held[::-1], strict=True) if yes), b"")

    def may_hold(self, i: int, key: bytes) -> bool:
        """Return whether a tier may hold the blob; True also if it does not answer."""
        return self._if_up(i, lambda: self._tiers[i].contains_many([key])[0], True)

    def locate(self, keys: Sequence[bytes]) -> Located:
        """Find the fastest tier of each blob; each tier is asked only for blobs not yet found."""
        levels: list[int | None] = [None] * len(keys)
        down = False
        for i in range(len(self)):
            missing = [j for j, level in enumerate(levels) if level is None]
            if not missing:
                break
            asked = [keys[j] for j in missing]
            try:
                held = self._unless_hidden(i, asked, self._tiers[i].contains_many(asked), False)
            except TierUnavailable:
                self._count_down(i)
                down = True
                continue
            for j, yes in zip(missing, held, strict=True):
                levels[j] = i if yes else None
        return Located(levels, down)

    def good_copy(
        self,
        key: bytes,
        levels: Iterable[int],
        use: Callable[[Blob], T],
        *,
        read: Callable[[int], Blob | None] | None = None,
        is_unused: Callable[[bytes], bool] = lambda key: False,
    ) -> GoodCopy[T] | MissReason:
        """Pass each copy of a blob to ``use`` until it accepts one, and replace the bad copies.

        Args:
            levels: tiers to read, in this order.
            use: verifies the copy, and may unpack it; raises ``Unusable`` to reject it.
            read: reads the blob from the tier of a level, for a caller that has read copies
                before; raises ``TierUnavailable`` as ``get`` does.
            is_unused: returns whether no session needs a key any more; bad copies of such a blob
                are deleted instead.

        Returns:
            The good copy, or why there is none.
        """
        reason: MissReason = "evicted"
        read = read or (lambda level: self.get(level, [key])[0])
        bad: list[int] = []
        good: GoodCopy[T] | None = None
        for level in levels:
            try:
                blob = read(level)
                if blob is not None:
                    good = GoodCopy(blob, level, use(blob))
                    break
            except TierUnavailable:
                reason = "unavailable" if reason == "evicted" else reason
            except ForeignCodec as error:  # kept, since another store may have the codec
                reason = "fingerprint"
                if isinstance(error, RefusedCodec) and level not in self.shared:
                    bad.append(level)  # it would prevent storing a readable copy
            except Unusable as error:
                reason = "corrupt"
                self._counters.add("corrupt")
                _log.warning("tier %s has a bad blob: %s", self._names[level], error)
                bad.append(level)
        for level in bad:
            # Not deleted first: with a chunk, a tier gives up all chunks that continue it.
            is_replaced = good is not None and self.replace(level, key, good.blob)
            if not is_replaced or is_unused(key):  # its session may be forgotten by now
                self.delete(level, [key])
        return good or reason

    def put(
        self,
        i: int,
        items: Sequence[tuple[bytes, Blob]],
        tenant: str = "",
        after: bytes = b"",
    ) -> bool:
        """Write blobs of a tenant to one tier; return whether it now holds every one of them.

        Args:
            after: key of the chunk before them in their chain; b"" = they are its beginning.
        """
        put = partial(self._tiers[i].put_many, items, tenant, after)
        is_done = not items or self._if_up(i, put, -1) == len(items)
        if is_done:
            self.show(i, [key for key, _ in items])
        return is_done

    def replace(self, i: int, key: bytes, blob: Blob, tenant: str = "", after: bytes = b"") -> bool:
        """Write a blob in place of an older one; return whether the tier took it.

        Args:
            after: for a record, the last key of its chain.
        """
        return self._if_up(i, lambda: self._tiers[i].replace(key, blob, tenant, after=after), False)

    def delete(self, i: int, keys: Sequence[bytes]) -> bool:
        """Delete blobs from one tier; False if it is not available."""
        return not keys or self._is_done(i, lambda: self._tiers[i].delete_many(keys))

    def saved_by(self, i: int, tenant: str, keys: Sequence[bytes]) -> None:
        """Mark a chain in one tier as just saved, and assign blobs without an owner to a tenant."""
        self._tiers[i].own(tenant, keys)
        self._is_done(i, lambda: self._tiers[i].touch(keys, restored=False))

    def own_in(self, i: int, tenant: str, keys: Sequence[bytes]) -> None:
        """Assign blobs to a tenant in one tier, unless they have an owner; see ``Tier.own``."""
        self._tiers[i].own(tenant, keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just restored, in every tier."""
        for i, tier in enumerate(self._tiers):
            self._is_done(i, partial(tier.touch, keys))

    def pin(self, key: bytes, pinned: bool) -> None:
        """Pin a session, by its record key, in every tier: it is evicted last. Or unpin it."""
        for tier in self._tiers:
            tier.pin(key, pinned)

    def scan(self, i: int, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """Yield the keys and blobs of one tier whose keys begin with ``prefix``.

        Ends early if the tier fails.
        """
        try:
            yield from self._tiers[i].scan(prefix)
        except TierUnavailable:
            self._count_down(i)

    def owed_file(self, i: int) -> Path | None:
        """Return the file for a tier's pending deletions; see ``Tier.owed_file``."""
        return self._tiers[i].owed_file

    def why_evicted(self, key: bytes, levels: Iterable[int]) -> EvictionCause | None:
        """Return why the first of these tiers that knows evicted a blob; None if none knows."""
        for i in levels:
            cause = self._tiers[i].why_evicted([key])[0]
            if cause is not None:
                return cause
        return None

    def limit_tenants(
        self, limits: Mapping[TierName, TenantLimits]
    ) -> dict[TierName, dict[str, int]]:
        """Limit the bytes of tenants in each tier.

        Returns:
            By tier, the bytes of each tenant that has a limit. Shared tiers, and tiers that do not
            answer, are left out, since their bytes by tenant are not known.
        """
        found: dict[TierName, dict[str, int]] = {}
        for i, tier in enumerate(self._tiers):
            limit = partial(tier.limit_tenants, limits.get(tier.name, NO_LIMITS))
            uses = self._if_up(i, limit, None)
            if uses is not None:
                found[tier.name] = uses
        return found

    def stats(self) -> list[TierStats]:
        return [x.stats() for x in self._tiers]

    def flush(self) -> bool:
        done = [self._is_done(i, tier.flush) for i, tier in enumerate(self._tiers)]
        return all(done)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _if_up(self, i: int, call: Callable[[], T], otherwise: T) -> T:
        """Return the result of a call to a tier; ``otherwise``, counted, if it is unavailable."""
        try:
            return call()
        except TierUnavailable:
            self._count_down(i)
            return otherwise

    def _is_done(self, i: int, call: Callable[[], object]) -> bool:
        """Call a tier; return False, and count that, if it is unavailable."""
        try:
            call()
            return True
        except TierUnavailable:
            self._count_down(i)
            return False

    def _count_down(self, i: int) -> None:
        self._counters.add(f"unavailable.{self._names[i]}")
