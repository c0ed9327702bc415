"""The eviction order of a tier: least recently used keys first, inside a byte budget.

The three tiers share this index of keys and sizes; each stores the blobs itself. Every step costs
O(1) per key. Three rules make plain least-recently-used eviction right for chains, where a blob is
useless once one before it is gone:

* Wherever keys come in chain order (``add``, ``touch``, ``unpin``), the *first* becomes the most
  recent of all, so a chain is evicted from its tail.
* A chain never evicts its own blobs. They are admitted in order and what does not fit is refused: a
  long chain keeps its head instead of its end.
* Pinned keys are out of the order; the last ``unpin`` brings them back as just used.

Not thread-safe: the owning tier calls it under its own lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class RecencyEntry(NamedTuple):
    """A key's size, and its place in the eviction order."""

    nbytes: int
    stamp: int  # grows with every use; a tier may persist it to restore the order


class IndexUpdate(NamedTuple):
    """The changes that ``add`` made and the tier has to follow.

    A key may be in both lists: evicted, then added afresh.
    """

    added: list[bytes]  # now in the index, blobs still to be written
    evicted: list[tuple[bytes, RecencyEntry]]  # no longer in the index, blobs still to be removed


class RecencyIndex:
    """Keys with their sizes, pins and order of use.

    Args:
        capacity_bytes: the budget that ``add`` and ``shrink`` keep.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._evictable: OrderedDict[bytes, RecencyEntry] = OrderedDict()  # least recent first
        self._pinned: dict[bytes, RecencyEntry] = {}  # present, but exempt
        self._num_pins: dict[bytes, int] = {}  # of absent keys, too
        self._evictable_bytes = 0
        self._pinned_bytes = 0
        self._last_stamp = 0

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
        """Pin count of each key, also of keys that are absent."""
        return dict(self._num_pins)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._evictable
        yield from self._pinned

    def entry(self, key: bytes) -> RecencyEntry | None:
        """Return the entry of a key, None if it is absent."""
        return self._evictable.get(key) or self._pinned.get(key)

    def add(self, sizes: Mapping[bytes, int]) -> IndexUpdate:
        """Add the keys of a chain (``key -> nbytes``) that fit, evicting others; all become recent.

        A key that is present keeps its size and is in neither list of the update.
        """
        added: list[bytes] = []
        evicted: list[tuple[bytes, RecencyEntry]] = []
        own = 0  # evictable bytes of this very chain; they stand at the recent end
        for key, nbytes in sizes.items():
            if key not in self:
                if self._pinned_bytes + own + nbytes > self.capacity_bytes:
                    continue
                evicted.extend(self._make_room(nbytes))
                self.insert(key, nbytes)
                added.append(key)
            elif key in self._evictable:
                self._evictable.move_to_end(key)
            if key in self._evictable:
                own += self._evictable[key].nbytes
        self.touch(list(sizes))
        return IndexUpdate(added, evicted)

    def shrink(self) -> list[tuple[bytes, RecencyEntry]]:
        """Evict until the budget holds, as far as pins allow; return what was evicted."""
        return list(self._make_room(0))

    def evict(self, nbytes: int, spare: Container[bytes]) -> list[tuple[bytes, RecencyEntry]]:
        """Evict the least recent keys, ``nbytes`` or more, even if the budget holds.

        Stops early where the next one is in ``spare``. Returns what was evicted.
        """
        evicted: list[tuple[bytes, RecencyEntry]] = []
        while nbytes > 0 and self._evictable and next(iter(self._evictable)) not in spare:
            key, entry = self._evictable.popitem(last=False)
            self._evictable_bytes -= entry.nbytes
            evicted.append((key, entry))
            nbytes -= entry.nbytes
        return evicted

    def _make_room(self, nbytes: int) -> Iterator[tuple[bytes, RecencyEntry]]:
        """Evict the least recent keys until ``nbytes`` more would fit; yield each."""
        while self._evictable and self.nbytes + nbytes > self.capacity_bytes:
            key, entry = self._evictable.popitem(last=False)
            self._evictable_bytes -= entry.nbytes
            yield key, entry

    def insert(self, key: bytes, nbytes: int, stamp: int | None = None) -> None:
        """Enter an absent key as the most recent, even beyond the budget.

        Args:
            stamp: one that was persisted; such keys must be entered in the order of their stamps.
        """
        if stamp is not None:
            self._last_stamp = stamp - 1
        entry = RecencyEntry(nbytes, self._next_stamp())
        if key in self._num_pins:
            self._pinned[key] = entry
            self._pinned_bytes += nbytes
        else:
            self._evictable[key] = entry
            self._evictable_bytes += nbytes

    def undo(self, update: IndexUpdate) -> None:
        """Take an ``add`` back: remove its keys, return the evicted ones as the least recent."""
        for key in update.added:
            self.remove(key)
        for key, entry in reversed(update.evicted):
            self.insert(key, entry.nbytes)
            if key in self._evictable:
                self._evictable[key] = entry
                self._evictable.move_to_end(key, last=False)

    def remove(self, key: bytes) -> RecencyEntry | None:
        """Remove a key and return its entry, None if it was absent.

        Its pins stay: they hold for the next blob of that key as well.
        """
        entry = self._evictable.pop(key, None)
        if entry is not None:
            self._evictable_bytes -= entry.nbytes
            return entry
        entry = self._pinned.pop(key, None)
        if entry is not None:
            self._pinned_bytes -= entry.nbytes
        return entry

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just used; ``keys[0]`` becomes the most recent of all."""
        for key in reversed(keys):
            if key in self._evictable:
                self._evictable[key] = RecencyEntry(self._evictable[key].nbytes, self._next_stamp())
                self._evictable.move_to_end(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Exempt keys from eviction, present or not; counted per key."""
        for key in keys:
            self._num_pins[key] = self._num_pins.get(key, 0) + 1
            entry = self._evictable.pop(key, None)
            if entry is not None:
                self._pinned[key] = entry
                self._evictable_bytes -= entry.nbytes
                self._pinned_bytes += entry.nbytes

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Take one pin off each key; a key without pins is left alone."""
        for key in reversed(list(keys)):
            count = self._num_pins.pop(key, 0) - 1
            if count > 0:
                self._num_pins[key] = count
                continue
            entry = self._pinned.get(key)
            if entry is not None:
                self.remove(key)
                self.insert(key, entry.nbytes)

    def _next_stamp(self) -> int:
        self._last_stamp += 1
        return self._last_stamp
