"""A tier whose blobs are sealed: a blob that others could have written is checked before use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvstore.errors import Corrupt
from kvstore.tenant_bytes import TenantLimits, TenantUse
from kvstore.tiers.base import Blob, EvictionCause, Tier, TierStats
from kvstore.tiers.seal import SEAL_BYTES, Seal

log = logging.getLogger(__name__)

NOT_OURS = b""  # no store accepts it: the store counts it as damaged, and removes it


class SealedTier:
    """Implements ``base.Tier`` around another tier. Returns ``NOT_OURS`` for a wrong seal.

    Names end with the key's own name: with a new secret the tier appears empty, and two servers of
    different secrets share a Redis without seeing each other's blobs.
    """

    def __init__(self, inner: Tier, seal: Seal) -> None:
        self._inner = inner
        self._seal = seal
        self._ending = seal.key_name
        self._counting = threading.Lock()
        self._num_refused = 0

    def __repr__(self) -> str:
        return f"SealedTier({self._inner!r})"

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def persistent(self) -> bool:
        return self._inner.persistent

    @property
    def owed_file(self) -> Path | None:
        return self._inner.owed_file

    @property
    def overhead_bytes(self) -> int:
        return self._inner.overhead_bytes + SEAL_BYTES + len(self._ending)

    # Reading

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        found = self._inner.get_many(self._names(keys))
        return [
            None if blob is None else self._opened(key, blob)
            for key, blob in zip(keys, found, strict=True)
        ]

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        for name, blob in self._inner.scan(prefix):
            if name.endswith(self._ending):
                key = name[: -len(self._ending)]
                yield key, self._opened(key, blob)

    def _opened(self, key: bytes, blob: Blob) -> Blob:
        try:
            return self._seal.open(key, blob)
        except Corrupt as error:
            with self._counting:
                self._num_refused += 1
                first = self._num_refused == 1
            if first:
                log.warning(
                    "%s tier: a blob is %s (further ones are only counted)", self.name, error
                )
            return NOT_OURS

    def written(self, prefix: bytes) -> list[bytes] | None:
        names = self._inner.written(prefix)
        if names is None:
            return None
        return [x[: -len(self._ending)] for x in names if x.endswith(self._ending)]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.contains_many(self._names(keys))

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        found = self._inner.lengths(self._names(keys))
        return [None if x is None else max(0, x - SEAL_BYTES) for x in found]

    # Writing

    def put_many(self, items: Sequence[tuple[bytes, Blob]], owner: str = "") -> int:
        return self._inner.put_many(
            [(key + self._ending, self._seal.close(key, blob)) for key, blob in items], owner
        )

    def replace(self, key: bytes, blob: Blob, owner: str = "", instead_of: bytes = b"") -> bool:
        before = instead_of + self._ending if instead_of else b""
        return self._inner.replace(key + self._ending, self._seal.close(key, blob), owner, before)

    def delete_many(self, keys: Iterable[bytes]) -> int:
        return self._inner.delete_many(self._names(keys))

    def drop_quarantine(self) -> None:
        self._inner.drop_quarantine()

    # Recency

    def own(self, owner: str, keys: Sequence[bytes], idle_s: float = 0.0) -> None:
        self._inner.own(owner, self._names(keys), idle_s)

    def limit_tenants(self, limits: TenantLimits) -> dict[str, TenantUse]:
        return self._inner.limit_tenants(limits)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._inner.touch(self._names(keys))

    def pin(self, keys: Iterable[bytes]) -> None:
        self._inner.pin(self._names(keys))

    def unpin(self, keys: Iterable[bytes]) -> None:
        self._inner.unpin(self._names(keys))

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [key + self._ending for key in keys]

    # Life

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        return self._inner.why_evicted(self._names(keys))

    def stats(self) -> TierStats:
        inner = self._inner.stats()
        return msgspec.structs.replace(inner, errors=inner.errors + self._num_refused)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()
