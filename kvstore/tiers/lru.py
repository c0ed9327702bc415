"""Who goes next when a tier is full: one recency order inside a byte budget.

The three tiers share this index; where the blobs themselves lie is theirs to know. Every step
costs O(1) per key. Three rules make plain least-recently-used eviction right for chains, where a
blob is useless once one before it is gone:

* Wherever keys come in chain order (``admit``, ``touch``, ``unpin``), the *first* ends up as the
  most recent of all, so a chain is eaten from its tail.
* A batch never evicts its own blobs. What does not fit is refused, and the first ones are served
  first: a long chain keeps its head instead of its end.
* Pinned keys are out of the order altogether; the last ``unpin`` brings them back as just used.

Not thread-safe: the owning tier calls it under its own lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    nbytes: int
    stamp: int  # grows with every use; the order in numbers, for tiers that persist it


class Admission(NamedTuple):
    """What ``admit`` decided. A key may be in both lists: evicted, then admitted afresh."""

    new: list[bytes]  # now in the index, blobs still to be written
    victims: list[tuple[bytes, Entry]]  # no longer in the index, blobs still to be removed


class RecencyIndex:
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._loose: OrderedDict[bytes, Entry] = OrderedDict()  # evictable, least recent first
        self._held: dict[bytes, Entry] = {}  # present and pinned
        self._pins: dict[bytes, int] = {}  # how often; of keys that are not present, too
        self._loose_bytes = 0
        self._held_bytes = 0
        self._last_stamp = 0

    def __len__(self) -> int:
        return len(self._loose) + len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._loose or key in self._held

    @property
    def nbytes(self) -> int:
        return self._loose_bytes + self._held_bytes

    def __iter__(self) -> Iterator[bytes]:
        yield from self._loose
        yield from self._held

    def entry(self, key: bytes) -> Entry | None:
        return self._loose.get(key) or self._held.get(key)

    def admit(self, sizes: Mapping[bytes, int]) -> Admission:
        """Make room for a chain of ``key -> nbytes`` and enter what fits; all become recent.

        Keys already present count as admitted but are in neither list.
        """
        new: list[bytes] = []
        victims: list[tuple[bytes, Entry]] = []
        spared = 0  # evictable bytes of this very batch; they stand at the recent end
        for key, nbytes in sizes.items():
            if key not in self:
                if self._held_bytes + spared + nbytes > self.capacity_bytes:
                    continue
                victims.extend(self._victims(nbytes))
                self.insert(key, nbytes)
                new.append(key)
            elif key in self._loose:
                self._loose.move_to_end(key)
            if key in self._loose:
                spared += self._loose[key].nbytes
        self.touch(list(sizes))
        return Admission(new, victims)

    def shrink(self) -> list[tuple[bytes, Entry]]:
        """Evict until the budget holds, as far as pins allow."""
        return list(self._victims(0))

    def evict(self, nbytes: int, spare: Container[bytes]) -> list[tuple[bytes, Entry]]:
        """Take the least recent ones out, ``nbytes`` or more, whatever the budget says.

        Fewer if one of ``spare`` would be next.
        """
        victims: list[tuple[bytes, Entry]] = []
        while nbytes > 0 and self._loose and next(iter(self._loose)) not in spare:
            key, entry = self._loose.popitem(last=False)
            self._loose_bytes -= entry.nbytes
            victims.append((key, entry))
            nbytes -= entry.nbytes
        return victims

    def _victims(self, nbytes: int) -> Iterator[tuple[bytes, Entry]]:
        """Take the least recent ones out until ``nbytes`` more would fit."""
        while self._loose and self.nbytes + nbytes > self.capacity_bytes:
            key, entry = self._loose.popitem(last=False)
            self._loose_bytes -= entry.nbytes
            yield key, entry

    def insert(self, key: bytes, nbytes: int, stamp: int | None = None) -> None:
        """Enter an absent key as the most recent, whatever the budget says.

        ``stamp``: one that was persisted; such keys are entered in the order of their stamps.
        """
        if stamp is not None:
            self._last_stamp = stamp - 1
        entry = Entry(nbytes, self._next_stamp())
        if key in self._pins:
            self._held[key] = entry
            self._held_bytes += nbytes
        else:
            self._loose[key] = entry
            self._loose_bytes += nbytes

    def retract(self, admission: Admission) -> None:
        """Undo an ``admit``: its new keys are out, its victims back as the least recent."""
        for key in admission.new:
            self.remove(key)
        for key, entry in reversed(admission.victims):
            self.insert(key, entry.nbytes)
            if key in self._loose:
                self._loose[key] = entry
                self._loose.move_to_end(key, last=False)

    def remove(self, key: bytes) -> Entry | None:
        """Forget a key. Its pins stay: they hold for the next blob of that key as well."""
        entry = self._loose.pop(key, None)
        if entry is not None:
            self._loose_bytes -= entry.nbytes
            return entry
        entry = self._held.pop(key, None)
        if entry is not None:
            self._held_bytes -= entry.nbytes
        return entry

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just used; ``keys[0]`` becomes the most recent of all."""
        for key in reversed(keys):
            if key in self._loose:
                self._loose[key] = Entry(self._loose[key].nbytes, self._next_stamp())
                self._loose.move_to_end(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
            entry = self._loose.pop(key, None)
            if entry is not None:
                self._held[key] = entry
                self._loose_bytes -= entry.nbytes
                self._held_bytes += entry.nbytes

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Take one pin off each key; a key without pins is left alone."""
        for key in reversed(list(keys)):
            count = self._pins.pop(key, 0) - 1
            if count > 0:
                self._pins[key] = count
                continue
            entry = self._held.get(key)
            if entry is not None:
                self.remove(key)
                self.insert(key, entry.nbytes)

    def _next_stamp(self) -> int:
        self._last_stamp += 1
        return self._last_stamp
