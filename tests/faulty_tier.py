"""A tier that goes wrong when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvstore.errors import TierUnavailable
from kvstore.session import TenantLimits, TierName
from kvstore.tiers.base import Blob, EvictionCause, Tier, TierStats

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T], go_on: threading.Event) -> T:
    """Return what a call does that ends in time, although a tier waits for ``go_on``."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        try:
            return calling.result(limit_s)
        finally:
            go_on.set()


class FaultyTier:
    """Passes everything on to ``inner``.

    ``fails(number, method)`` decides, call by call from 0 on, which ones raise ``TierUnavailable``.
    After ``hang(method)`` its calls wait until ``go_on`` is set; ``entered`` says that one does.
    """

    def __init__(self, inner: Tier, name: str = "") -> None:
        self.inner = inner
        self._name = name or inner.name
        self.fails: Callable[[int, str], bool] = lambda number, method: False
        self.hanging = "get_many"
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def hang(self, method: str = "get_many") -> None:
        self.hanging = method
        self.go_on.clear()

    @property
    def name(self) -> TierName:
        return self._name

    @property
    def owed_file(self) -> Path | None:
        return self.inner.owed_file

    def _call(self, method: str) -> None:
        with self._lock:
            number = len(self.calls)
            self.calls.append(method)
        if self.fails(number, method):
            raise TierUnavailable(f"{method}, call {number}, was set to fail")
        if method == self.hanging and not self.go_on.is_set():
            self.entered.set()
            self.go_on.wait(20)

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        self._call("get_many")
        return self.inner.get_many(keys)

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        self._call("put_many")
        return self.inner.put_many(items, owner, after)

    def replace(
        self,
        key: bytes,
        blob: Blob,
        owner: str = "",
        after: bytes = b"",
    ) -> bool:
        self._call("replace")
        return self.inner.replace(key, blob, owner, after)

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        self._call("contains_many")
        return self.inner.contains_many(keys)

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        self._call("lengths")
        return self.inner.lengths(keys)

    def own(self, owner: str, keys: Sequence[bytes]) -> None:
        self.inner.own(owner, keys)

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        return self.inner.why_evicted(keys)

    def limit_tenants(self, limits: TenantLimits) -> dict[str, int] | None:
        self._call("limit_tenants")
        return self.inner.limit_tenants(limits)

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        self._call("touch")
        self.inner.touch(keys, restored=restored)

    def pin(self, key: bytes, pinned: bool) -> None:
        self.inner.pin(key, pinned)

    def delete_many(self, keys: Iterable[bytes]) -> int:
        self._call("delete_many")
        return self.inner.delete_many(keys)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        self._call("scan")
        yield from self.inner.scan(prefix)

    def stats(self) -> TierStats:
        return self.inner.stats()

    def flush(self) -> None:
        self._call("flush")
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()
