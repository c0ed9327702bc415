"""Reports to EngineCore which tiers hold the blocks of sessions; rank 0 stands for all.

Every tier evicts a chain from its end, so it holds the first blocks of a session, or none.

A session is checked as soon as a save or a verb is done, and again until slower tiers have written
it. Evictions are found by a sweep over all sessions, which takes at most about one part in
``SWEEP_SHARE`` of the time. It runs after evictions, and every ``UNASKED_S`` seconds without any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from engines.vllm_plugin.inventory import read_event_note
from engines.vllm_plugin.messages import RankRests
from kvstore.blobs.chain import Piece, joined
from kvstore.ledger.record import SessionRecord
from kvstore.session import TIERS, SessionName, SessionRef
from kvstore.store.cold_store import ColdStore
from kvstore.workers import Periodic

LOOK_S: Final = 0.25
SWEEP_S: Final = 1.0  # between sweeps over all sessions, at least
SWEEP_SHARE: Final = 20
# The time until a loss is found that no eviction counter shows: a Redis server evicted blobs, or a
# file is damaged.
UNASKED_S: Final = 60.0

# Hash of the note with the block hashes, and the numbers of blocks in memory and in slower tiers.
_State: TypeAlias = tuple[int, int, int]


class RestingWatch:
    """Watches the sessions of a store. Thread-safe. ``send`` passes news to the hub, in order."""

    def __init__(
        self,
        store: ColdStore,
        block_tokens: int,
        send: Callable[[RankRests], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._chunk_blocks = store.chunk_tokens // block_tokens
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
            found = self._store.pieces_of(session)
            if found is None or not found[0].note:
                if self._reported.pop(name, None) is not None:
                    self._send(RankRests(session))
                return
            record, pieces = found
            state = hash(record.note), *self._held(record, pieces)
            if self._reported.get(name) != state:
                self._reported[name] = state
                hashes, ids = read_event_note(record.note, record.num_chunks, self._chunk_blocks)
                self._send(RankRests(session, joined(hashes), ids, *state[1:]))

    def _held(self, record: SessionRecord, pieces: Sequence[Piece]) -> tuple[int, int]:
        """Count the first blocks in memory, and in slower tiers. One that is down has none."""
        stack, size = self._store.ledger.stack, record.chunk_tokens
        end = record.num_chunks
        if self._store.model.needs_state:  # only a prefix that ends at a stored state can be used
            states = [x for x in pieces if x.is_state]
            levels = stack.locate([x.key for x in states]).levels
            held = [x for x, level in zip(states, levels, strict=True) if level is not None]
            end = max((x.first_token // size for x in held), default=0)
        keys = [x.key for x in pieces if x.is_chunk and x.end_token <= end * size]
        in_ram = slower = 0
        for level, name in enumerate(stack.names):
            in_memory = not TIERS[name].outlives_engine
            first = 0 if in_memory else slower  # another tier is asked for the rest only
            num_held = first + [*stack.holds(level, keys[first:]), False].index(False)
            in_ram, slower = (num_held, slower) if in_memory else (in_ram, num_held)
        return in_ram * self._chunk_blocks, slower * self._chunk_blocks
