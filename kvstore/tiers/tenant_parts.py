"""Counts the bytes that each tenant holds of a tier, and the guaranteed part of them.

A share of the budget is divided equally between the tenants that used the tier within a day. Blobs
of such a tenant within its part are not evicted for others, however much they write; a tenant that
holds more than its part loses blobs first. The rest of the budget goes by recency alone. A tenant
that has been away for longer has no part: its blobs are evicted as they grow old.

Blobs without a known tenant (left by an earlier run, say, and needed by no session) have the owner
"", who is guaranteed nothing. Not thread-safe: ``RecencyIndex`` owns it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

ACTIVE_S: Final = 24 * 3600.0


class TenantParts:
    """Bytes and eviction order by owner.

    Args:
        guaranteed_bytes: of the budget, for all active tenants together.
        monotonic: seconds that never jump.
    """

    def __init__(self, guaranteed_bytes: float, monotonic: Callable[[], float]) -> None:
        self._guaranteed_bytes = guaranteed_bytes
        self._monotonic = monotonic
        self._orders: dict[str, OrderedDict[bytes, None]] = {}  # evictable; least recent first
        self._evictable: Counter[str] = Counter()  # bytes
        self._pinned: Counter[str] = Counter()
        self._used_s: OrderedDict[str, float] = OrderedDict()  # of active tenants; longest first

    def resize(self, guaranteed_bytes: float) -> None:
        """Guarantee another number of bytes to all active tenants together."""
        self._guaranteed_bytes = guaranteed_bytes

    def use(self, owner: str) -> None:
        """Record that a tenant is active."""
        if owner and self._guaranteed_bytes:
            self._used_s[owner] = self._monotonic()
            self._used_s.move_to_end(owner)

    def used_before(self, owner: str, idle_s: float) -> None:
        """Record that a tenant used a blob ``idle_s`` seconds ago, perhaps in an earlier run."""
        at = self._monotonic() - max(idle_s, 0.0)
        if owner and idle_s <= ACTIVE_S and at > self._used_s.get(owner, -math.inf):
            self._used_s[owner] = at
            self._used_s = OrderedDict(sorted(self._used_s.items(), key=lambda x: x[1]))

    # ---- held bytes

    def enter(self, owner: str, key: bytes, nbytes: int) -> None:
        """Count a blob that can be evicted, as the owner's most recent."""
        order = self._orders.get(owner)
        if order is None:
            order = self._orders[owner] = OrderedDict()
        order[key] = None
        self._evictable[owner] += nbytes

    def leave(self, owner: str, key: bytes, nbytes: int) -> None:
        """Stop counting a blob that can be evicted."""
        order = self._orders[owner]
        del order[key]
        self._evictable[owner] -= nbytes
        if not order:
            del self._orders[owner], self._evictable[owner]

    def order(self, owner: str) -> OrderedDict[bytes, None]:
        """Return the owner's blobs that can be evicted, the least recent first."""
        return self._orders[owner]

    def move(self, owner: str, key: bytes, *, last: bool) -> None:
        """Make a blob the owner's most recent, or its least recent."""
        self._orders[owner].move_to_end(key, last=last)

    def sort(self, owner: str, stamp: Callable[[bytes], int]) -> None:
        """Put the owner's blobs in the order of their stamps."""
        if owner in self._orders:
            self._orders[owner] = OrderedDict.fromkeys(sorted(self._orders[owner], key=stamp))

    def pin(self, owner: str, nbytes: int) -> None:
        """Count a blob that cannot be evicted; a negative number stops counting it."""
        self._pinned[owner] += nbytes
        if not self._pinned[owner]:
            del self._pinned[owner]

    def held(self, owner: str) -> int:
        """Return the bytes that an owner holds."""
        return self._evictable[owner] + self._pinned[owner]

    def pinned(self, owner: str) -> int:
        """Return the bytes of an owner that cannot be evicted."""
        return self._pinned[owner]

    @property
    def owners(self) -> set[str]:
        """The owners that hold bytes."""
        return {*self._evictable, *self._pinned}

    # ---- guaranteed bytes

    def has_part(self, owner: str) -> bool:
        """True if any bytes are guaranteed to this tenant now."""
        return self._part() > 0 and owner in self._used_s

    def kept_for_others(self, owner: str) -> float:
        """Return how many evictable bytes of other tenants are kept from this tenant's writes."""
        if not (part := self._part()):
            return 0.0
        others = (x for x in self._used_s if x != owner)
        return sum(max(0.0, min(self._evictable[x], part - self._pinned[x])) for x in others)

    def givers(
        self, writer: str = "", num_bytes: int = 0, own_bytes: int = 0
    ) -> Callable[[str], bool]:
        """Return a function: true for an owner whose blobs may be evicted for ``writer``.

        Args:
            num_bytes: that the writer needs space for; they count as held.
            own_bytes: of the very chain that is written, which is never evicted for itself.
        """
        part = self._part()

        def gives(owner: str) -> bool:
            held = self._evictable[owner] + self._pinned[owner]
            if owner == writer:
                held += num_bytes
                if self._evictable[owner] <= own_bytes:
                    return False
            return held > (part if owner in self._used_s else 0.0)

        return gives

    def oldest(self, gives: Callable[[str], bool]) -> Iterator[bytes]:
        """Yield the least recent blob of each owner whose blobs may be evicted."""
        yield from (next(iter(order)) for owner, order in self._orders.items() if gives(owner))

    def oldest_of(self, owner: str, own_bytes: int) -> bytes | None:
        """Return a tenant's least recent blob, if it holds more than ``own_bytes``."""
        if self._evictable[owner] <= own_bytes:
            return None
        return next(iter(self._orders[owner]))

    def _part(self) -> float:
        """Return the bytes guaranteed to each active tenant."""
        if not self._guaranteed_bytes:
            return 0.0
        since = self._monotonic() - ACTIVE_S
        while self._used_s and next(iter(self._used_s.values())) < since:
            self._used_s.popitem(last=False)
        return self._guaranteed_bytes / max(1, len(self._used_s))
