"""The tiers of one store, fastest first, with every failure turned into a miss.

A tier is named here by its place in the stack: 0 is the fastest. Tiers are inclusive: a blob may
rest in several of them, and the fastest copy is the one to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.errors import TierUnavailable
from kvstore.records import TierName
from kvstore.stats import Counters
from kvstore.tiers.base import Blob, Tier, TierStats


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

    def name(self, i: int) -> TierName:
        return self._names[i]

    def place(self, name: TierName) -> int | None:
        return self._names.index(name) if name in self._names else None

    def get(self, i: int, keys: Sequence[bytes]) -> list[Blob | None]:
        """Raises ``TierUnavailable``, already counted."""
        try:
            return self._tiers[i].get_many(keys)
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
            return self._tiers[i].contains_many(keys)
        except TierUnavailable:
            self._count_down(i)
            return [False] * len(keys)

    def may_hold(self, i: int, key: bytes) -> bool:
        """False only if the tier says that it does not."""
        try:
            return self._tiers[i].contains_many([key])[0]
        except TierUnavailable:
            self._count_down(i)
            return True

    def locate(self, keys: Sequence[bytes]) -> Located:
        """Asks slower tiers only for what faster ones do not have."""
        places: list[int | None] = [None] * len(keys)
        down = False
        for i, tier in enumerate(self._tiers):
            missing = [j for j, place in enumerate(places) if place is None]
            if not missing:
                break
            try:
                held = tier.contains_many([keys[j] for j in missing])
            except TierUnavailable:
                self._count_down(i)
                down = True
                continue
            for j, yes in zip(missing, held, strict=True):
                places[j] = i if yes else None
        return Located(places, down)

    def put(self, i: int, items: Sequence[tuple[bytes, Blob]]) -> bool:
        """True if the tier now holds every one of them."""
        try:
            return not items or self._tiers[i].put_many(items) == len(items)
        except TierUnavailable:
            self._count_down(i)
            return False

    def replace(self, i: int, key: bytes, blob: Blob) -> bool:
        try:
            return self._tiers[i].replace(key, blob)
        except TierUnavailable:
            self._count_down(i)
            return False

    def delete(self, i: int, keys: Sequence[bytes]) -> bool:
        """False if the tier could not be asked to."""
        try:
            if keys:
                self._tiers[i].delete_many(keys)
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
            self._tiers[i].touch(keys)
        except TierUnavailable:
            self._count_down(i)

    def pin(self, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            tier.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            tier.unpin(keys)

    @contextmanager
    def pinned_in(self, i: int, keys: Sequence[bytes]) -> Iterator[None]:
        self._tiers[i].pin(keys)
        try:
            yield
        finally:
            self._tiers[i].unpin(keys)

    def scan(self, i: int, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        """Ends early if the tier goes away."""
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

    def _flushed(self, i: int) -> bool:
        try:
            self._tiers[i].flush()
            return True
        except TierUnavailable:
            self._count_down(i)
            return False

    def _count_down(self, i: int) -> None:
        self._counters.add(f"unavailable.{self._names[i]}")


def _name(tier: Tier) -> TierName:
    for name in ("ram", "disk", "redis"):
        if tier.name == name:
            return name
    raise ValueError(f"a tier named {tier.name!r}; there are ram, disk and redis")
