"""The tiers of one store, fastest first, with every failure turned into a miss.

A tier is named here by its place in the stack: 0 is the fastest. Tiers are inclusive: a blob may
rest in several of them, and the fastest copy is the one to read. Whoever asks speaks of keys; under
which codec's mark a blob lies, and in which it is put, is known here alone (``marks``). One key has
one blob in a tier as a rule, and never two that say different things.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.errors import TierUnavailable
from kvstore.marks import Marks, mark_of, marked
from kvstore.records import TierName
from kvstore.stats import Counters
from kvstore.tiers.base import Blob, Tier, TierStats

MAX_MET: Final = 64  # marks of codecs that only others have, or that were used long ago
# What was pinned, tier by tier, under the names that it had.
Grip: TypeAlias = tuple[list[bytes], ...]


@dataclass(frozen=True)
class Located:
    """Where blobs rest: per key the fastest tier that has it. ``down``: some tier did not say."""

    places: list[int | None]
    down: bool

    @property
    def num_leading(self) -> int:
        """How many keys, from the first one on, are held without a hole."""
        return self.places.index(None) if None in self.places else len(self.places)


class TierStack:
    """Thread-safe, as its tiers are. Nothing here raises ``TierUnavailable`` except ``get``."""

    def __init__(self, tiers: Sequence[Tier], counters: Counters) -> None:
        self._tiers = tuple(tiers)
        self._counters = counters
        self._names: tuple[TierName, ...] = tuple(_name(x) for x in tiers)
        # Replaced as a whole while other threads look.
        self._marks: tuple[Marks, ...] = tuple(Marks() for _ in tiers)
        self._meeting = threading.Lock()
        self._met: tuple[bytes, ...] = ()  # marks of all codecs that anything here may be in

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def local(self) -> list[int]:
        """Tiers that no other machine writes to."""
        return [i for i, name in enumerate(self._names) if name != "redis"]

    @property
    def shared(self) -> list[int]:
        return [i for i, name in enumerate(self._names) if name == "redis"]

    @property
    def overhead_bytes(self) -> int:
        """Of the tier where a blob takes most besides its own bytes."""
        return max((x.overhead_bytes for x in self._tiers), default=0)

    @property
    def names(self) -> tuple[TierName, ...]:
        return self._names

    def name(self, i: int) -> TierName:
        return self._names[i]

    def place(self, name: TierName) -> int | None:
        return self._names.index(name) if name in self._names else None

    def mark(self, marks: Sequence[Marks]) -> None:
        """From now on blobs are put and looked for under these: one for each tier."""
        self._marks = tuple(marks)
        self._meet(x for one in marks for x in (one.home, *one.others))

    def meet(self, codec_ids: Iterable[str]) -> None:
        """Somebody's blobs are in these codecs: who deletes blobs looks there, too."""
        self._meet(map(mark_of, codec_ids))

    def _meet(self, marks: Iterable[bytes]) -> None:
        with self._meeting:
            self._met = tuple(dict.fromkeys((*self._met, *marks)))[:MAX_MET]

    def get(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        """Raises ``TierUnavailable``, already counted."""
        marks = self._marks[i]
        try:
            found = self._tiers[i].get_many([marks.one(key) for key in keys])
            for mark in marks.others:
                rest = {j: marked(keys[j], mark) for j, x in enumerate(found) if x is None}
                rest = {j: x for j, x in rest.items() if x != keys[j]}  # records have no mark
                if rest:
                    again = self._tiers[i].get_many(list(rest.values()))
                    found = _filled(found, dict(zip(rest, again, strict=True)))
            return found
        except TierUnavailable:
            self._count_down(i)
            raise

    def find(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        try:
            return self.get(i, keys)
        except TierUnavailable:
            return [None] * len(keys)

    def holds(self, i: int, keys: Sequence[bytes]) -> list[bool]:
        try:
            return self._contains(i, keys)
        except TierUnavailable:
            self._count_down(i)
            return [False] * len(keys)

    def may_hold(self, i: int, key: bytes) -> bool:
        """False only if the tier says that it does not."""
        try:
            return self._contains(i, [key])[0]
        except TierUnavailable:
            self._count_down(i)
            return True

    def locate(self, keys: Sequence[bytes]) -> Located:
        """Asks slower tiers only for what faster ones do not have."""
        places: list[int | None] = [None] * len(keys)
        down = False
        for i in range(len(self)):
            missing = [j for j, place in enumerate(places) if place is None]
            if not missing:
                break
            try:
                held = self._contains(i, [keys[j] for j in missing])
            except TierUnavailable:
                self._count_down(i)
                down = True
                continue
            for j, yes in zip(missing, held, strict=True):
                places[j] = i if yes else None
        return Located(places, down)

    def put(self, i: int, items: Sequence[tuple[bytes, Blob]]) -> bool:
        """True if the tier now holds every one of them."""
        marks = self._marks[i]
        named = [(marks.new(key, blob), blob) for key, blob in items]
        try:
            return not items or self._tiers[i].put_many(named) == len(items)
        except TierUnavailable:
            self._count_down(i)
            return False

    def replace(self, i: int, key: bytes, blob: Blob) -> bool:
        try:
            return self._tiers[i].replace(self._marks[i].new(key, blob), blob)
        except TierUnavailable:
            self._count_down(i)
            return False

    def delete(self, i: int, keys: Sequence[bytes]) -> bool:
        """False if the tier could not be asked to. Copies in codecs of old go, too."""
        marks = (self._marks[i].home, *self._marks[i].others, *self._met)
        names = dict.fromkeys(marked(key, mark) for mark in marks for key in keys)
        try:
            if keys:
                self._tiers[i].delete_many(names)
            return True
        except TierUnavailable:
            self._count_down(i)
            return False

    def touch(self, keys: Sequence[bytes]) -> None:
        """In every tier, ``keys[0]`` the most recent."""
        for i in range(len(self)):
            self.touch_in(i, keys)

    def touch_in(self, i: int, keys: Sequence[bytes]) -> None:
        try:
            self._tiers[i].touch(self._marks[i].all(keys))
        except TierUnavailable:
            self._count_down(i)

    def pin(self, keys: Sequence[bytes]) -> Grip:
        """In every tier; until the grip is let go."""
        grip = tuple(marks.all(keys) for marks in self._marks)
        for tier, names in zip(self._tiers, grip, strict=True):
            tier.pin(names)
        return grip

    def unpin(self, grip: Grip) -> None:
        for tier, names in zip(self._tiers, grip, strict=True):
            tier.unpin(names)

    @contextmanager
    def pinned_in(self, i: int, keys: Sequence[bytes]) -> Iterator[None]:
        names = self._marks[i].all(keys)
        self._tiers[i].pin(names)
        try:
            yield
        finally:
            self._tiers[i].unpin(names)

    def scan(self, i: int, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """Under the names that the tier has for them. Ends early if the tier goes away."""
        try:
            yield from self._tiers[i].scan(prefix)
        except TierUnavailable:
            self._count_down(i)

    def stats(self) -> list[TierStats]:
        return [x.stats() for x in self._tiers]

    def flush(self) -> bool:
        done = [self._flushed(i) for i in range(len(self))]
        return all(done)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _contains(self, i: int, keys: Sequence[bytes]) -> list[bool]:
        """Raises ``TierUnavailable``, not counted. One question, however many codecs there are."""
        marks = self._marks[i]
        if not marks.others:
            return self._tiers[i].contains_many([marks.one(key) for key in keys])
        names = marks.all(keys)
        held = {x for x, yes in zip(names, self._tiers[i].contains_many(names), strict=True) if yes}
        return [not held.isdisjoint(marks.all([key])) for key in keys]

    def _flushed(self, i: int) -> bool:
        try:
            self._tiers[i].flush()
            return True
        except TierUnavailable:
            self._count_down(i)
            return False

    def _count_down(self, i: int) -> None:
        self._counters.add(f"unavailable.{self._names[i]}")


def _filled(blobs: list[Blob | None], more: dict[int, Blob | None]) -> list[Blob | None]:
    return [more.get(j) if blob is None else blob for j, blob in enumerate(blobs)]


def _name(tier: Tier) -> TierName:
    for name in ("ram", "disk", "redis"):
        if tier.name == name:
            return name
    raise ValueError(f"a tier named {tier.name!r}; there are ram, disk and redis")
