"""The store's counters."""

from __future__ import annotations

import threading
from collections import Counter

import msgspec

from kvstore.tiers.base import TierStats as TierStats


class Repacking(msgspec.Struct, frozen=True):
    """The progress of packing blobs that are stored unpacked; it continues in idle moments."""

    sessions_left: int = 0
    bytes_left: int = 0  # present bytes of these sessions
    sessions_done: int = 0  # since the start
    freed_bytes: int = 0  # in all tiers together


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The store's statistics at one moment. All counters only grow.

    ``saves`` ended with a record in a tier; ``saves_skipped`` found the queue full;
    ``saves_superseded`` were replaced by a newer one of the session; ``saves_failed`` reached no
    tier. ``chunks_packed``, ``states_packed``; ``chunks_left_out``, which had been restored from a
    lossy copy that was evicted since, and those after them; ``repacked_blobs``, which were stored
    exactly before; ``restores``, ``restored_tokens``, ``promoted_blobs``.
    ``corrupt``: blobs found damaged and deleted. ``misses.<reason>``: see ``MissReason``.
    ``behind.<tier>``: saves that a slower tier did not take in time. ``unavailable.<tier>``: calls
    that a tier could not answer. ``compilations`` in this process, those of them in the background
    (``background_compilations``: no request waits), and their ``compilation_ms`` on a processor.
    """

    counters: dict[str, int]
    save_queue_bytes: int  # hot bytes waiting for the codec
    write_queue_bytes: dict[str, int]  # packed bytes waiting for each slower tier
    num_sessions: int
    tiers: list[TierStats]
    codec: str = ""  # id of the codec of new blobs' rows
    repacking: Repacking = Repacking()
    differs: tuple[str, ...] = ()  # from the data on the Redis; see ``kvstore.likeness``


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
