"""Reports to EngineCore which tiers of a rank hold the blocks of its sessions.

A session is checked as soon as a save or a verb is done, and again until slower tiers have written
it. Evictions are found by a sweep over all sessions, which takes at most about one part in
``SWEEP_SHARE`` of the time. It runs after evictions, and every ``UNASKED_S`` seconds without any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from engines.vllm_plugin.messages import RankRests
from kvstore.session import SessionName, SessionRef
from kvstore.store.block_keys import Resting
from kvstore.store.block_store import BlockStore
from kvstore.workers import Periodic

LOOK_S: Final = 0.25
SWEEP_S: Final = 1.0  # between sweeps over all sessions, at least
SWEEP_SHARE: Final = 20
# The time until a loss is found that no eviction counter shows: a Redis server evicted blobs, or a
# file is damaged.
UNASKED_S: Final = 60.0

_State: TypeAlias = tuple[int, int, Resting]  # hash of the block hashes, bytes of ids, locations


class RestingWatch:
    """Watches the sessions of one rank. Thread-safe. ``send`` passes news to the hub, in order."""

    def __init__(
        self,
        store: BlockStore,
        rank: int,
        send: Callable[[RankRests], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._send = send
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._reported: dict[SessionName, _State] = {}
        self._noted: dict[SessionName, None] = {}
        self._num_evictions = 0
        self._swept_at = float("-inf")
        self._next_sweep = float("-inf")
        self._periodic: Periodic | None = None

    def begin(self) -> None:
        """Call ``look`` periodically from now on, until ``close``. Call this once."""
        self._periodic = Periodic(self.look, LOOK_S, "thermocline-resting")

    def close(self) -> None:
        """Stop looking."""
        if self._periodic is not None:
            self._periodic.close()

    def start_over(self) -> None:
        """Report all sessions again: the hub is a new one without any records."""
        with self._lock:
            self._reported.clear()
            self._swept_at = self._next_sweep = float("-inf")

    def note(self, session: SessionRef) -> None:
        """Check the session soon, and repeatedly until slower tiers have written it."""
        with self._lock:
            self._noted[session.name] = None

    def look_at(self, session: SessionRef) -> None:
        """Report the session's present tiers, if they have changed."""
        self.note(session)
        self._look_at(session.name)

    def look(self) -> None:
        """Report what has changed since the last look."""
        stats = self._store.stats()  # taken first: blobs written by now are found below
        num_evictions = sum(x.evictions for x in stats.tiers)
        with self._lock:
            noted, self._noted = self._noted, {}
        for name in noted:
            self._look_at(name)
        now = self._monotonic()
        changed = num_evictions != self._num_evictions or now - self._swept_at >= UNASKED_S
        if changed and now >= self._next_sweep:
            self._num_evictions, self._swept_at = num_evictions, now
            self._sweep()
            took = self._monotonic() - now
            self._next_sweep = now + took + max(SWEEP_S, SWEEP_SHARE * took)
        if any(stats.write_queue_bytes.values()):
            with self._lock:
                self._noted = {**noted, **self._noted}

    def _sweep(self) -> None:
        names = [(x.tenant, x.id) for x in self._store.records()]
        for name in dict.fromkeys([*names, *list(self._reported)]):
            self._look_at(name)

    def _look_at(self, name: SessionName) -> None:
        session = SessionRef(*name, b"")
        with self._lock:  # otherwise an older state could be reported after a newer one
            found = self._store.resting(session)
            if found is None:
                if self._reported.pop(name, None) is not None:
                    self._send(RankRests(self._rank, session))
                return
            record, resting = found
            state = hash(record.hashes), len(record.ids), resting
            if self._reported.get(name) != state:
                self._reported[name] = state
                runs = resting.ram, resting.storage
                self._send(RankRests(self._rank, session, record.hashes, record.ids, *runs))
