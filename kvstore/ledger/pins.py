"""Keeps blobs of pinned sessions from eviction.

All pins together take at most a share of the smallest tier: pinned blobs are never evicted, and
without a bound one tenant could leave the others no room. One tenant gets at most a part of that
share, so that no tenant can take from all others the right to pin. A pin beyond either is refused.
A pinned session that *grows* beyond it keeps those blobs pinned that already were, and the rest can
be evicted.

The bytes counted are those that tiers use, not the packed ones: a small blob fills whole pages of
the disk.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import PinLimit
from kvstore.ledger.stack import TierStack
from kvstore.session import SHARED_TIERS


class PinnedSession(NamedTuple):
    """A session to be pinned: its blobs and their bytes."""

    record_key: bytes
    tenant: str
    keys: Sequence[bytes]  # of all its blobs
    nbytes: int  # packed


class _Held(NamedTuple):
    tenant: str
    keys: Sequence[bytes]
    nbytes: int  # that a tier uses


_NOTHING = _Held("", (), 0)


class Pins:
    """Follows pinned sessions as they grow. Thread-safe.

    Args:
        share: of the smallest tier, for all pins.
        tenant_share: of the first share, for the pins of one tenant.
    """

    def __init__(self, stack: TierStack, share: float, tenant_share: float) -> None:
        self._stack = stack
        rooms = [x.capacity_bytes for x in stack.stats() if x.name not in SHARED_TIERS]
        self._max_bytes = int(share * min(rooms, default=0))  # a shared server knows no pins
        self._max_tenant_bytes = int(tenant_share * self._max_bytes)
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}  # by record key
        self._by_tenant: Counter[str] = Counter()  # bytes

    @property
    def pinned(self) -> dict[bytes, Sequence[bytes]]:
        """Keys of the blobs that are pinned, by the record key of their session."""
        with self._lock:
            return {record_key: x.keys for record_key, x in self._held.items()}

    def check(self, pin: PinnedSession) -> None:
        """Check that the session can be pinned beside the others. Raises ``PinLimit`` if not."""
        nbytes = self._nbytes(pin)
        with self._lock:
            before = self._held.get(pin.record_key, _NOTHING)
            others = self._by_tenant.total() - before.nbytes
            own = self._by_tenant[pin.tenant] - before.nbytes
        if own + nbytes > self._max_tenant_bytes:
            raise PinLimit(
                f"a tenant's pinned sessions may take {self._max_tenant_bytes} bytes and take"
                f" {own}; this one has {nbytes}: unpin another, or raise store.pinned_share or"
                " store.tenant_pinned_share"
            )
        if others + nbytes > self._max_bytes:
            raise PinLimit(
                f"pinned sessions may take {self._max_bytes} bytes and take {others}; this one"
                f" has {nbytes}: unpin another, or raise store.pinned_share"
            )

    def follow(self, pin: PinnedSession) -> None:
        """Pin the session's present blobs in place of those pinned before."""
        with self._lock:
            before = self._take_out(pin.record_key)
            keys, nbytes = pin.keys, self._nbytes(pin)
            if not self._fits(pin.tenant, nbytes):
                old = set(before.keys)
                keys, nbytes = [x for x in pin.keys if x in old], before.nbytes
            # Pins are counted. The new ones come first, so that no blob is unpinned in between.
            self._stack.pin(keys)
            now = _Held(pin.tenant, keys, nbytes)
            if keys:
                self._held[pin.record_key] = now
                self._by_tenant[now.tenant] += now.nbytes
            self._loosen(before)

    def release(self, record_key: bytes) -> None:
        with self._lock:
            if record_key in self._held:
                self._loosen(self._take_out(record_key))

    def _loosen(self, held: _Held) -> None:
        if held.keys:
            self._stack.unpin(held.keys)

    def _take_out(self, record_key: bytes) -> _Held:
        held = self._held.pop(record_key, _NOTHING)
        self._by_tenant -= Counter({held.tenant: held.nbytes})
        return held

    def _fits(self, tenant: str, nbytes: int) -> bool:
        own = self._by_tenant[tenant] + nbytes
        all_bytes = self._by_tenant.total() + nbytes
        return own <= self._max_tenant_bytes and all_bytes <= self._max_bytes

    def _nbytes(self, pin: PinnedSession) -> int:
        return pin.nbytes + len(pin.keys) * self._stack.overhead_bytes
