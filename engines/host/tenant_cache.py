"""A cache of tenants' results in which no tenant can push out those of the others."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Generic, TypeAlias, TypeVar

_Key: TypeAlias = tuple[str, bytes]  # tenant, digest
_Value = TypeVar("_Value")


class TenantCache(Generic[_Value]):
    """An LRU cache by tenant and digest, bounded in number and bytes. Not thread-safe.

    Beyond a bound, the oldest entry of the tenant that holds the most is dropped.
    """

    def __init__(self, max_entries: int, max_bytes: float = math.inf) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()  # latest used last
        self._num: Counter[str] = Counter()  # by tenant
        self._nbytes: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: _Key) -> _Value | None:
        """Return an entry's value, and count the entry as used."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def add(self, key: _Key, value: _Value, nbytes: int = 0) -> None:
        """Add an entry, or replace it."""
        self._drop(key)
        self._entries[key] = value, nbytes
        self._num[key[0]] += 1
        self._nbytes[key[0]] += nbytes
        while self._nbytes.total() > self._max_bytes:
            self._drop_of(self._nbytes.most_common(1)[0][0])
        while len(self._entries) > self._max_entries:
            self._drop_of(self._num.most_common(1)[0][0])

    def _drop_of(self, tenant: str) -> None:
        self._drop(next(x for x in self._entries if x[0] == tenant))

    def _drop(self, key: _Key) -> None:
        if key in self._entries:
            _, nbytes = self._entries.pop(key)
            for held, amount in ((self._num, 1), (self._nbytes, nbytes)):
                held[key[0]] -= amount
                if not held[key[0]]:
                    del held[key[0]]
