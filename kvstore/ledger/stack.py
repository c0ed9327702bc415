"""The tiers of one store, fastest first, with every failure turned into a miss.

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
    """The copy that was accepted, the level of its tier, and the result of using it."""

    blob: Blob
    level: int
    value: T


@dataclass(frozen=True)
class Located:
    """Levels of the fastest tiers that have each key. ``down``: some tier did not answer."""

    levels: list[int | None]
    down: bool

    @property
    def num_leading(self) -> int:
        """Number of keys, from the first one on, that are held without a hole."""
        return self.levels.index(None) if None in self.levels else len(self.levels)


class TierStack:
    """Thread-safe, as its tiers are. Nothing here raises ``TierUnavailable`` except ``get``."""

    def __init__(self, tiers: Sequence[Tier], counters: Counters) -> None:
        self._tiers = tuple(tiers)
        self._counters = counters
        self._names: tuple[TierName, ...] = tuple(x.name for x in tiers)
        self._hiding = threading.Lock()
        self._hidden: list[set[bytes]] = [set() for _ in self._tiers]

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers themselves, fastest first, for tests that look into them."""
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

    # ---- deletions that a tier owes

    def hide(self, i: int, keys: Iterable[bytes]) -> None:
        """Take these blobs for gone in one tier, until they are written there again."""
        with self._hiding:
            self._hidden[i].update(keys)

    def show(self, i: int, keys: Iterable[bytes]) -> None:
        """End ``hide``: they are gone, or may be found again."""
        if hidden := self._hidden[i]:
            with self._hiding:
                hidden.difference_update(keys)

    def _unless_hidden(self, i: int, keys: Sequence[bytes], found: list[T], gone: T) -> list[T]:
        if not (hidden := self._hidden[i]):
            return found
        return [gone if key in hidden else x for key, x in zip(keys, found, strict=True)]

    # ---- blobs

    def get(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        """Read blobs from one tier; None for those it lacks. Raises ``TierUnavailable``."""
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
        """Count the first chunks of a chain that a tier of this machine holds.

        Such a tier evicts chains from their ends, so the chain is not gone through.
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
        """False only if the tier answers that it does not hold the blob."""
        return self._if_up(i, lambda: self._tiers[i].contains_many([key])[0], True)

    def locate(self, keys: Sequence[bytes]) -> Located:
        """Find the fastest tier of each blob; slower ones are asked only for the rest."""
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
        """Give ``use`` one copy of a blob after another until it accepts one; mend bad copies.

        Args:
            levels: tiers to read, in this order.
            use: verifies the copy, and may unpack it; raises ``Unusable`` to reject it.
            read: replaces the reading of a tier, if a copy was read before; raises
                ``TierUnavailable`` as ``get`` does.
            is_unused: no session needs the blob by now, so that it is removed and not mended.

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
            except ForeignCodec as error:  # held, for those that can read it
                reason = "fingerprint"
                if isinstance(error, RefusedCodec) and level not in self.shared:
                    bad.append(level)  # else no readable copy would be stored
            except Unusable as error:
                reason = "corrupt"
                self._counters.add("corrupt")
                _log.warning("a bad blob in %s: %s", self._names[level], error)
                bad.append(level)
        for level in bad:
            # In its place, since a tier would give up all that continues a chunk that is deleted.
            is_mended = good is not None and self.replace(level, key, good.blob)
            if not is_mended or is_unused(key):  # its session may be forgotten by now
                self.delete(level, [key])
        return good or reason

    def put(
        self,
        i: int,
        items: Sequence[tuple[bytes, Blob]],
        tenant: str = "",
        after: bytes = b"",
    ) -> bool:
        """Write blobs of a tenant to one tier; True if it now holds every one of them.

        ``after``: the chunk before them in their chain; b"" = they are its beginning.
        """
        put = partial(self._tiers[i].put_many, items, tenant, after)
        is_done = not items or self._if_up(i, put, -1) == len(items)
        if is_done:
            self.show(i, [key for key, _ in items])
        return is_done

    def replace(self, i: int, key: bytes, blob: Blob, tenant: str = "", after: bytes = b"") -> bool:
        """Write a blob in place of the one of this key; False if the tier did not take it.

        ``after``: for a record, the last key of its chain.
        """
        return self._if_up(i, lambda: self._tiers[i].replace(key, blob, tenant, after=after), False)

    def delete(self, i: int, keys: Sequence[bytes]) -> bool:
        """Delete blobs from one tier; False if it is not available."""
        return not keys or self._is_done(i, lambda: self._tiers[i].delete_many(keys))

    def saved_by(self, i: int, tenant: str, keys: Sequence[bytes]) -> None:
        """Mark a chain in one tier as just saved by a tenant, whose it is if it has no owner."""
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
        """Evict the session of this record last in every tier, or end that."""
        for tier in self._tiers:
            tier.pin(key, pinned)

    def scan(self, i: int, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """List blobs under the tier's names for them. Ends early if the tier fails."""
        try:
            yield from self._tiers[i].scan(prefix)
        except TierUnavailable:
            self._count_down(i)

    def owed_file(self, i: int) -> Path | None:
        """Return where deletions that a tier owes outlive the process; see ``Tier.owed_file``."""
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
        """Hold tenants to bytes of tiers; return the bytes of those with a limit, by tier.

        Tiers that do not answer, and a shared one, are left out: what their tenants hold is not
        known.
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
        """Call a tier; a tier that is not available is counted, and costs ``otherwise``."""
        try:
            return call()
        except TierUnavailable:
            self._count_down(i)
            return otherwise

    def _is_done(self, i: int, call: Callable[[], object]) -> bool:
        """Call a tier; False, and counted, if it is not available."""
        try:
            call()
            return True
        except TierUnavailable:
            self._count_down(i)
            return False

    def _count_down(self, i: int) -> None:
        self._counters.add(f"unavailable.{self._names[i]}")
