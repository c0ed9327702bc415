"""The eviction order of a tier: least recently used keys first, inside a byte budget.

The three tiers share this index of keys and sizes; each stores the blobs itself. Every step costs
O(1) per key. Three rules adapt plain least-recently-used eviction to chains, in which a blob is
useless once a blob before it is gone:

* Wherever keys come in chain order (``add``, ``touch``, ``unpin``), the *first* becomes the most
  recent of all, so a chain is evicted from its tail.
* A chain never evicts its own blobs. They are admitted in order and those that do not fit are
  refused: a long chain keeps its head instead of its end.
* Pinned keys are not in the order; the last ``unpin`` brings them back as just used.

A fourth rule makes it fair: while other tenants write, a tenant's guaranteed part of the budget is
left out of the order (``tenant_parts``). A fifth one bounds it: a tenant with a limit never holds
more than that beside its pinned blobs; its own least recent blobs make way for its new ones.

Not thread-safe: the owning tier calls it under its own lock.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kvstore.tenant_bytes import NO_LIMITS, TenantLimits, TenantUse
from kvstore.tiers.base import EvictionCause, EvictionCauses
from kvstore.tiers.tenant_parts import TenantParts


class RecencyEntry(msgspec.Struct, frozen=True, gc=False):
    """A key's size, its place in the eviction order, and its tenant."""

    nbytes: int
    stamp: int  # grows with every use; a tier may persist it to restore the order
    owner: str = ""


class IndexUpdate(NamedTuple):
    """The changes that ``add`` made to the index and the tier must make to its blobs.

    A key may be in both lists: evicted, then added afresh.
    """

    added: list[bytes]  # now in the index, blobs still to be written
    evicted: list[tuple[bytes, RecencyEntry]]  # no longer in the index, blobs still to be removed


class RecencyIndex:
    """Keys with their sizes, pins and order of use.

    Args:
        capacity_bytes: the budget that ``add`` and ``shrink`` keep.
        guaranteed_share: of the budget, divided between active tenants; 0 = order of use alone.
    """

    def __init__(
        self,
        capacity_bytes: int,
        guaranteed_share: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._guaranteed_share = guaranteed_share
        self._monotonic = monotonic
        self._parts = TenantParts(guaranteed_share * capacity_bytes, monotonic)
        self._limits = NO_LIMITS
        self._missed: Counter[str] = Counter()  # bytes by tenant; see ``TenantUse``
        self._evictable: OrderedDict[bytes, RecencyEntry] = OrderedDict()  # least recent first
        self._pinned: dict[bytes, RecencyEntry] = {}  # present, but exempt
        self._num_pins: dict[bytes, int] = {}  # of absent keys, too
        self._evictable_bytes = 0
        self._pinned_bytes = 0
        self._last_stamp = 0
        self._first_stamp = 0
        self._causes = EvictionCauses()

    def emptied(self) -> RecencyIndex:
        """Make an index of the same budget and limits without keys and pins."""
        index = RecencyIndex(self.capacity_bytes, self._guaranteed_share, self._monotonic)
        index._limits = self._limits
        return index

    def __len__(self) -> int:
        return len(self._evictable) + len(self._pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._evictable or key in self._pinned

    @property
    def nbytes(self) -> int:
        """The sizes of all keys together."""
        return self._evictable_bytes + self._pinned_bytes

    @property
    def pinned_bytes(self) -> int:
        """The sizes of all pinned keys together."""
        return self._pinned_bytes

    @property
    def pins(self) -> dict[bytes, int]:
        """Pin count of each key, including absent keys."""
        return dict(self._num_pins)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._evictable
        yield from self._pinned

    def entry(self, key: bytes) -> RecencyEntry | None:
        """Return the entry of a key, None if it is absent."""
        return self._evictable.get(key) or self._pinned.get(key)

    def add(self, sizes: Mapping[bytes, int], owner: str = "") -> IndexUpdate:
        """Add the keys of a chain (``key -> nbytes``) that fit, evicting others; all become recent.

        A key that is present keeps its size and is in neither list of the update. A key is not
        added if it cannot fit beside pinned keys and those guaranteed to other tenants, or if its
        owner's limit leaves no room beside the owner's pinned keys.
        """
        added: dict[bytes, int] = {}
        evicted: list[tuple[bytes, RecencyEntry]] = []
        self._parts.use(owner)
        limit = self._limits.of(owner)
        is_ample = self.nbytes + sum(sizes.values()) <= self.capacity_bytes
        room = self.capacity_bytes - (0 if is_ample else self._parts.kept_for_others(owner))
        # Evictable bytes of this very chain, which are at the recent end, and those to be entered.
        own = new = 0
        for key, nbytes in sizes.items():
            if (entry := self._evictable.get(key)) is not None:
                self._evictable.move_to_end(key)
                self._parts.move(entry.owner, key, last=True)
                own += entry.nbytes
            elif key not in self._pinned:
                if self._pinned_bytes + own + new + nbytes > room:
                    continue
                if limit is not None:
                    if self._parts.pinned(owner) + own + new + nbytes > limit:
                        self._missed[owner] += nbytes
                        continue
                    for victim in self._keep_to_limit(owner, new + nbytes, own):
                        self._missed[owner] += victim[1].nbytes
                        evicted.append(victim)
                new += nbytes
                if self._evictable_bytes + self._pinned_bytes + new > self.capacity_bytes:
                    evicted.extend(self._make_room(new, owner, own))
                added[key] = nbytes
        self._make_recent(list(sizes), added, owner)
        return IndexUpdate(list(added), evicted)

    def expect(self, owner: str, idle_s: float) -> None:
        """Record that a tenant used blobs ``idle_s`` seconds ago that are entered only later."""
        self._parts.used_before(owner, idle_s)

    def own(self, owner: str, keys: Iterable[bytes], idle_s: float = 0.0) -> None:
        """Assign keys to an owner, if they are present and have no owner yet.

        ``idle_s``: for how many seconds the owner has used none of them.
        """
        found: dict[bytes, RecencyEntry] = {}
        for key in keys:
            entry = self._evictable.get(key) or self._pinned.get(key)
            if entry is not None and not entry.owner:
                found[key] = entry
        for key, entry in found.items():
            now = RecencyEntry(entry.nbytes, entry.stamp, owner)
            if key in self._evictable:
                self._evictable[key] = now
                self._parts.leave("", key, entry.nbytes)
                self._parts.enter(owner, key, entry.nbytes)
            else:
                self._pinned[key] = now
                self._parts.pin("", -entry.nbytes)
                self._parts.pin(owner, entry.nbytes)
        if found and owner:
            self._parts.used_before(owner, idle_s)
            self._parts.sort(owner, self._stamp)

    def limit(self, limits: TenantLimits) -> list[tuple[bytes, RecencyEntry]]:
        """Set the limits of tenants from now on, and evict what is beyond them; return that."""
        if limits.counts_only:
            return []
        self._limits = limits
        return [x for owner in self._parts.owners for x in self._keep_to_limit(owner)]

    def take_uses(self, limits: TenantLimits) -> dict[str, TenantUse]:
        """Return the bytes of each tenant with one of these limits; count missed ones afresh."""
        missed, self._missed = self._missed, Counter()
        return {
            x: TenantUse(self._parts.held(x), missed[x])
            for x in self._parts.owners | missed.keys()
            if limits.of(x) is not None
        }

    def resize(self, capacity_bytes: int) -> None:
        """Set another budget from now on; ``shrink`` enforces it."""
        self.capacity_bytes = capacity_bytes
        self._parts.resize(self._guaranteed_share * capacity_bytes)

    def shrink(self) -> list[tuple[bytes, RecencyEntry]]:
        """Evict until the budget holds, as far as pins allow; return the evicted keys."""
        return list(self._make_room(0))

    def evict(self, nbytes: int, spare: Container[bytes]) -> list[tuple[bytes, RecencyEntry]]:
        """Evict the least recent keys, ``nbytes`` or more, even if the budget holds.

        Stops early if the next key is in ``spare``. Returns the evicted keys.
        """
        evicted: list[tuple[bytes, RecencyEntry]] = []
        while nbytes > 0 and self._evictable:
            key = self._next_victim(self._parts.givers()) or next(iter(self._evictable))
            if key in spare:
                break
            self._causes.remember(key, "budget")
            entry = self._take_out(key)
            evicted.append((key, entry))
            nbytes -= entry.nbytes
        return evicted

    def _keep_to_limit(
        self, owner: str, nbytes: int = 0, own: int = 0
    ) -> Iterator[tuple[bytes, RecencyEntry]]:
        """Evict an owner's least recent keys until its limit allows ``nbytes`` more; yield each."""
        if (limit := self._limits.of(owner)) is None:
            return
        while self._parts.held(owner) + nbytes > limit:
            key = self._parts.oldest_of(owner, own)
            if key is None:
                return
            self._causes.remember(key, "limit")
            yield key, self._take_out(key)

    def _make_room(
        self, nbytes: int, owner: str = "", own: int = 0
    ) -> Iterator[tuple[bytes, RecencyEntry]]:
        """Evict the least recent keys until ``nbytes`` more would fit; yield each."""
        gives = self._parts.givers(owner, nbytes, own)
        while self._evictable and self.nbytes + nbytes > self.capacity_bytes:
            key = self._next_victim(gives, owner, own)
            if key is None:
                return
            self._causes.remember(key, self._cause(key, gives, owner))
            yield key, self._take_out(key)

    def _next_victim(
        self, gives: Callable[[str], bool], owner: str = "", own: int = 0
    ) -> bytes | None:
        """Find the least recent key among tenants that hold more than is guaranteed to them.

        If there is none, pins take the rest of the budget: then the writer's own keys are evicted.
        """
        oldest, entry = next(iter(self._evictable.items()))
        if gives(entry.owner):
            return oldest
        surplus = min(self._parts.oldest(gives), key=self._stamp, default=None)
        return surplus or self._parts.oldest_of(owner, own)

    def _cause(self, key: bytes, gives: Callable[[str], bool], writer: str) -> EvictionCause:
        """Return why a key is the next victim of this tenant's write."""
        owner = self._evictable[key].owner
        if not self._parts.has_part(owner):
            return "budget"
        is_over = gives(owner)
        makes_way = writer not in ("", owner) or key != next(iter(self._evictable))
        return "share" if is_over and makes_way else "budget"

    def why_evicted(self, keys: Iterable[bytes]) -> list[EvictionCause | None]:
        """Return for each key why it was evicted; None: it was not, or too long ago."""
        return self._causes.of(keys)

    def _stamp(self, key: bytes) -> int:
        return self._evictable[key].stamp

    def _take_out(self, key: bytes) -> RecencyEntry:
        entry = self._evictable.pop(key)
        self._evictable_bytes -= entry.nbytes
        self._parts.leave(entry.owner, key, entry.nbytes)
        return entry

    def insert(self, key: bytes, nbytes: int, stamp: int | None = None, owner: str = "") -> None:
        """Enter an absent key as the most recent, even beyond the budget.

        Args:
            stamp: one that was persisted; such keys must be inserted in the order of their stamps.
        """
        self._last_stamp = self._last_stamp + 1 if stamp is None else stamp
        self._enter(key, RecencyEntry(nbytes, self._last_stamp, owner))

    def insert_oldest(self, key: bytes, nbytes: int, owner: str = "") -> None:
        """Enter an absent key as the least recent of all, even beyond the budget."""
        self._first_stamp -= 1
        self._enter(key, RecencyEntry(nbytes, self._first_stamp, owner))
        if key in self._evictable:
            self._make_oldest(key)

    def _enter(self, key: bytes, entry: RecencyEntry) -> None:
        self._causes.came_back(key)
        if key in self._num_pins:
            self._enter_pinned(key, entry)
        else:
            self._evictable[key] = entry
            self._evictable_bytes += entry.nbytes
            self._parts.enter(entry.owner, key, entry.nbytes)

    def _make_oldest(self, key: bytes) -> None:
        self._evictable.move_to_end(key, last=False)
        self._parts.move(self._evictable[key].owner, key, last=False)

    def _enter_pinned(self, key: bytes, entry: RecencyEntry) -> None:
        self._pinned[key] = entry
        self._pinned_bytes += entry.nbytes
        self._parts.pin(entry.owner, entry.nbytes)

    def undo(self, update: IndexUpdate) -> None:
        """Undo an ``add``: remove its keys, and put the evicted ones back as the least recent."""
        for key in update.added:
            self.remove(key)
        for key, entry in reversed(update.evicted):
            self.insert(key, entry.nbytes, owner=entry.owner)
            if key in self._evictable:
                self._evictable[key] = entry
                self._make_oldest(key)

    def remove(self, key: bytes) -> RecencyEntry | None:
        """Remove a key and return its entry, None if it was absent.

        Its pins stay: they also apply to the next blob of that key.
        """
        if key in self._evictable:
            return self._take_out(key)
        entry = self._pinned.pop(key, None)
        if entry is not None:
            self._pinned_bytes -= entry.nbytes
            self._parts.pin(entry.owner, -entry.nbytes)
        return entry

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just used; ``keys[0]`` becomes the most recent of all."""
        self._make_recent(keys)

    def _make_recent(
        self, keys: Sequence[bytes], new: Mapping[bytes, int] = MappingProxyType({}), by: str = ""
    ) -> None:
        """Mark a chain as just used, and enter those that are ``new``, with their sizes."""
        evictable, owner = self._evictable, None
        for key in reversed(keys):
            if (entry := evictable.get(key)) is not None:
                if entry.owner != owner:  # most keys of a chain have one
                    owner = entry.owner
                    order = self._parts.order(owner)
                self._last_stamp += 1
                evictable[key] = RecencyEntry(entry.nbytes, self._last_stamp, owner)
                evictable.move_to_end(key)
                order.move_to_end(key)
            elif key in new:
                self._last_stamp += 1
                self._enter(key, RecencyEntry(new[key], self._last_stamp, by))
        if keys and (first := self.entry(keys[0])) is not None:
            self._parts.use(first.owner)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Exempt keys from eviction, present or not; counted per key."""
        for key in keys:
            self._num_pins[key] = self._num_pins.get(key, 0) + 1
            if key in self._evictable:
                self._enter_pinned(key, self._take_out(key))

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Take one pin off each key; a key without pins is ignored."""
        for key in reversed(list(keys)):
            count = self._num_pins.pop(key, 0) - 1
            if count > 0:
                self._num_pins[key] = count
                continue
            entry = self._pinned.get(key)
            if entry is not None:
                self.remove(key)
                self.insert(key, entry.nbytes, owner=entry.owner)
