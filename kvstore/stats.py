"""The store's counters."""

from __future__ import annotations

import threading
from collections import Counter

import msgspec

from kvstore.tiers.base import TierStats as TierStats


class Repacking(msgspec.Struct, frozen=True):
    """The progress of packing the blobs that were stored exactly, which runs in idle moments."""

    sessions_left: int = 0
    bytes_left: int = 0  # what these sessions take now
    sessions_done: int = 0  # since the start
    freed_bytes: int = 0  # in all tiers together


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The store's statistics at one moment. All counters only grow.

    ``saves`` ended with a record in a tier; ``saves_skipped`` found the queue full;
    ``saves_superseded`` were replaced by a newer save of the session; ``saves_failed`` reached no
    tier. ``chunks_packed`` and ``states_packed`` were packed by saves. ``chunks_left_out`` were not
    saved again, because they or chunks before them had been restored from a lossy copy that has
    been evicted since. ``repacked_blobs`` were stored exactly before. ``restores``,
    ``restored_tokens`` and ``promoted_blobs`` (copied to the fastest tier) count returns.
    ``corrupt``: blobs found damaged and deleted. ``misses.<reason>``: see ``MissReason``.
    ``behind.<tier>``: saves that a slower tier did not take in time. ``unavailable.<tier>``: calls
    that a tier could not answer. ``compilations``: kernels compiled in this process, of which
    ``background_compilations`` while no request waited; ``compilation_ms``: their processor time.
    """

    counters: dict[str, int]
    save_queue_bytes: int  # hot bytes waiting for the codec
    write_queue_bytes: dict[str, int]  # packed bytes waiting for each slower tier
    num_sessions: int
    tiers: list[TierStats]
    codec: str = ""  # id of the codec that packs the rows of new blobs
    repacking: Repacking = Repacking()
    differs: tuple[str, ...] = ()  # how this store differs from the Redis; see ``kvstore.likeness``


class Counters:
    """Counters by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
