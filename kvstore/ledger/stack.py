"""The tiers of one store, fastest first, with every failure turned into a miss.

A tier is identified here by its level in the stack: 0 is the fastest. Tiers are inclusive: several
may hold the same blob, and the fastest copy is the one to read. Callers name blobs by keys; only
this module knows under which codec's tag a blob is stored (``codec_set``). A key usually has one
blob in a tier, and never two with different contents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from kvstore.blobs.codec_set import CodecTags, tag_of, tagged
from kvstore.errors import TierUnavailable
from kvstore.session import SHARED_TIERS, TierName
from kvstore.stats import Counters
from kvstore.tenant_bytes import TenantLimits, TenantUse
from kvstore.tiers.base import Blob, EvictionCause, Tier, TierStats

T = TypeVar("T")
MAX_MET: Final = 64  # tags of codecs that only other engines have, or that were used long ago
# The pinned names, tier by tier, as they were when they were pinned.
PinnedNames: TypeAlias = tuple[list[bytes], ...]


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
        # Replaced as a whole, since other threads read it without a lock.
        self._tags: tuple[CodecTags, ...] = tuple(CodecTags() for _ in tiers)
        self._meeting = threading.Lock()
        self._met: tuple[bytes, ...] = ()  # tags of all codecs that any blob here may be in

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers themselves, fastest first; for callers that use them directly."""
        return self._tiers

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def local(self) -> list[int]:
        """Levels of tiers that no other machine writes to."""
        return [i for i, name in enumerate(self._names) if name not in SHARED_TIERS]

    @property
    def shared(self) -> list[int]:
        return [i for i, name in enumerate(self._names) if name in SHARED_TIERS]

    @property
    def names(self) -> tuple[TierName, ...]:
        return self._names

    def name(self, i: int) -> TierName:
        return self._names[i]

    def level(self, name: TierName) -> int | None:
        return self._names.index(name) if name in self._names else None

    def tag(self, tags: Sequence[CodecTags]) -> None:
        """Store and look for blobs under these tags from now on: one ``CodecTags`` per tier."""
        self._tags = tuple(tags)
        self._meet(x for one in tags for x in (one.home, *one.others))

    def meet(self, codec_ids: Iterable[str]) -> None:
        """Note that blobs may be in these codecs, too, so that deletions cover them."""
        self._meet(map(tag_of, codec_ids))

    def _meet(self, tags: Iterable[bytes]) -> None:
        with self._meeting:
            self._met = tuple(dict.fromkeys((*self._met, *tags)))[:MAX_MET]

    def get(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        """Read blobs from one tier; None for those it lacks. Raises ``TierUnavailable``."""
        try:
            return self._asked(i, keys, self._tiers[i].get_many)
        except TierUnavailable:
            self._count_down(i)
            raise

    def lengths(self, i: int, keys: Sequence[bytes]) -> list[int | None]:
        """Return the lengths of blobs without reading them; None for those that one tier lacks."""
        ask = self._tiers[i].lengths
        return self._if_up(i, lambda: self._asked(i, keys, ask), [None] * len(keys))

    def _asked(
        self, i: int, keys: Sequence[bytes], ask: Callable[[Sequence[bytes]], list[T]]
    ) -> list[T]:
        """Ask for blobs under one codec's tag after another. Raises ``TierUnavailable``."""
        tags = self._tags[i]
        if not tags.others:
            return ask(tags.all(keys))
        found = ask([tags.one(key) for key in keys])
        for tag in tags.others:
            rest = {j: tagged(keys[j], tag) for j, x in enumerate(found) if x is None}
            rest = {j: x for j, x in rest.items() if x != keys[j]}  # records have no tag
            if rest:
                for j, x in zip(rest, ask(list(rest.values())), strict=True):
                    found[j] = x
        return found

    def find(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        try:
            return self.get(i, keys)
        except TierUnavailable:
            return [None] * len(keys)

    def holds(self, i: int, keys: Sequence[bytes]) -> list[bool]:
        return self._if_up(i, lambda: self._contains(i, keys), [False] * len(keys))

    def may_hold(self, i: int, key: bytes) -> bool:
        """False only if the tier answers that it does not hold the blob."""
        return self._if_up(i, lambda: self._contains(i, [key])[0], True)

    def locate(self, keys: Sequence[bytes]) -> Located:
        """Find the fastest tier of each blob; slower ones are asked only for the rest."""
        levels: list[int | None] = [None] * len(keys)
        down = False
        for i in range(len(self)):
            missing = [j for j, level in enumerate(levels) if level is None]
            if not missing:
                break
            try:
                held = self._contains(i, [keys[j] for j in missing])
            except TierUnavailable:
                self._count_down(i)
                down = True
                continue
            for j, yes in zip(missing, held, strict=True):
                levels[j] = i if yes else None
        return Located(levels, down)

    def put(
        self,
        i: int,
        items: Sequence[tuple[bytes, Blob]],
        tenant: str = "",
        after: bytes = b"",
    ) -> bool:
        """Write blobs of a tenant to one tier; True if it now holds every one of them.

        ``after``: the key before them in their chain; b"" = they are its beginning.
        """
        named = self._tags[i].named(items)

        def put() -> int:
            return self._tiers[i].put_many(named, tenant, self._held_name(i, after))

        return not items or self._if_up(i, put, -1) == len(items)

    def replace(self, i: int, key: bytes, blob: Blob, tenant: str = "", after: bytes = b"") -> bool:
        """Write a record; ``after``: the last key of its chain."""
        name = self._tags[i].new(key, blob)

        def replaced() -> bool:
            end = self._held_name(i, after)
            return self._tiers[i].replace(name, blob, tenant, after=end)

        return self._if_up(i, replaced, False)

    def _held_name(self, i: int, key: bytes) -> bytes:
        """Return the name under which one tier holds a key. Raises ``TierUnavailable``."""
        names = self._tags[i].all([key]) if key else [b""]
        if len(names) == 1:
            return names[0]
        held = zip(names, self._tiers[i].contains_many(names), strict=True)
        return next((name for name, yes in held if yes), names[0])

    def hold_in(self, i: int, codec_id: str, keys: Sequence[bytes]) -> list[bool]:
        """Return for each blob whether one tier has it under the tag of this codec."""
        names = [tagged(x, tag_of(codec_id)) for x in keys]
        return self._if_up(i, lambda: self._tiers[i].contains_many(names), [False] * len(keys))

    def find_in(self, i: int, codec_id: str, key: bytes) -> Blob | None:
        """Read the blob that one tier has under the tag of this codec."""
        name = tagged(key, tag_of(codec_id))
        return self._if_up(i, lambda: self._tiers[i].get_many([name])[0], None)

    def exchange(self, i: int, codec_id: str, key: bytes, blob: Blob, tenant: str) -> bool:
        """Replace the copy that one tier has under this codec's tag by another blob.

        False: nothing changed, or the replaced copy may still exist as well.
        """
        tier = self._tiers[i]
        old, new = tagged(key, tag_of(codec_id)), self._tags[i].new(key, blob)

        def exchanged() -> bool:
            if old != new and tier.contains_many([new])[0]:
                return tier.delete_many([old]) == 1
            return tier.replace(new, blob, tenant, b"" if old == new else old)

        return self._if_up(i, exchanged, False)

    def delete(self, i: int, keys: Sequence[bytes]) -> bool:
        """Delete blobs, in any codec, from one tier; False if it is not available."""
        if not keys:
            return True
        tags = dict.fromkeys((self._tags[i].home, *self._tags[i].others, *self._met))
        names = dict.fromkeys(tagged(x, tag) for tag in tags for x in keys)
        return self._is_done(i, lambda: self._tiers[i].delete_many(names))

    def saved_by(self, i: int, tenant: str, keys: Sequence[bytes]) -> None:
        """Mark a chain in one tier as just saved by a tenant, whose it is if it has no owner."""
        names = self._tags[i].all(keys)
        self._tiers[i].own(tenant, names)
        self._is_done(i, lambda: self._tiers[i].touch(names, restored=False))

    def own_in(self, i: int, tenant: str, keys: Sequence[bytes]) -> None:
        """Assign blobs to a tenant in one tier, unless they have an owner; see ``Tier.own``."""
        self._tiers[i].own(tenant, self._tags[i].all(keys))

    def drop_quarantine(self, i: int) -> bool:
        """Remove data that a tier put aside as damaged; False if it is not available."""
        return self._is_done(i, self._tiers[i].drop_quarantine)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just restored, in every tier."""
        for i, tier in enumerate(self._tiers):
            self._is_done(i, partial(tier.touch, self._tags[i].all(keys)))

    def pin(self, keys: Sequence[bytes]) -> PinnedNames:
        """Evict these blobs last in every tier, until ``unpin``."""
        pinned = tuple(tags.all(keys) for tags in self._tags)
        for tier, names in zip(self._tiers, pinned, strict=True):
            tier.pin(names)
        return pinned

    def unpin(self, pinned: PinnedNames) -> None:
        for tier, names in zip(self._tiers, pinned, strict=True):
            tier.unpin(names)

    def pins_known(self, i: int) -> None:
        """Note that what earlier lives have pinned is pinned; see ``Tier.pins_known``."""
        self._tiers[i].pins_known()

    def scan(self, i: int, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """List blobs under the tier's names for them. Ends early if the tier fails."""
        try:
            yield from self._tiers[i].scan(prefix)
        except TierUnavailable:
            self._count_down(i)

    def owed_file(self, i: int) -> Path | None:
        """Return where deletions that a tier owes outlive the process; see ``Tier.owed_file``."""
        return self._tiers[i].owed_file

    def written(self, i: int, prefix: bytes) -> list[bytes] | None:
        """List what counts in a tier's budget; see ``Tier.written``."""
        return self._tiers[i].written(prefix)

    def why_evicted(self, key: bytes, levels: Sequence[int]) -> EvictionCause | None:
        """Return why the first of these tiers that knows evicted a blob; None if none knows."""
        for i in levels:
            causes = set(self._tiers[i].why_evicted(self._tags[i].all([key]))) - {None}
            if causes:
                return "limit" if "limit" in causes else "budget"
        return None

    def limit_tenants(self, i: int, limits: TenantLimits) -> dict[str, TenantUse] | None:
        """Hold tenants to limits in one tier; None if it is not known what they hold there."""
        return self._if_up(i, lambda: self._tiers[i].limit_tenants(limits), None)

    def stats(self) -> list[TierStats]:
        return [x.stats() for x in self._tiers]

    def flush(self) -> bool:
        done = [self._is_done(i, tier.flush) for i, tier in enumerate(self._tiers)]
        return all(done)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _contains(self, i: int, keys: Sequence[bytes]) -> list[bool]:
        """Ask a tier for blobs in every codec at once. Raises ``TierUnavailable``, not counted."""
        tags = self._tags[i]
        if not tags.others:
            return self._tiers[i].contains_many(tags.all(keys))
        names = tags.all(keys)
        held = {x for x, yes in zip(names, self._tiers[i].contains_many(names), strict=True) if yes}
        return [not held.isdisjoint(tags.all([key])) for key in keys]

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
