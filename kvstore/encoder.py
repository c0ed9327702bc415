"""From one turn's live KV to the blobs that no tier holds yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from kvstore.packer import Packer
from kvstore.revision import Turn, kept_positions
from kvstore.save_queue import SaveJob
from kvstore.session_keys import KeyMaker
from kvstore.shapes import slice_tokens
from kvstore.stats import Counters
from kvstore.tier_stack import TierStack
from kvstore.workers import Workers


@dataclass(frozen=True)
class Encoded:
    fresh: dict[bytes, bytes]  # new blobs by key, in the order of their tokens
    snapshots: tuple[int, ...]  # positions that the session keeps
    packed_bytes: int  # of all blobs of the session; a close upper bound where rows may escape
    state_bytes: int  # of these, snapshots


class Encoder:
    """Thread-safe; called on the saving thread, works on the codec threads."""

    def __init__(
        self,
        stack: TierStack,
        packer: Packer,
        keys: KeyMaker,
        workers: Workers,
        counters: Counters,
        max_snapshots: int,
    ) -> None:
        self._stack = stack
        self._packer = packer
        self._keys = keys
        self._workers = workers
        self._counters = counters
        self._max_snapshots = max_snapshots
        self._size = keys.space.chunk_tokens

    def encode(self, turn: Turn, job: SaveJob) -> Encoded:
        fresh = dict(self._chunks(turn, job))
        self._counters.add("chunks_encoded", len(fresh))
        if self._keys.needs_state:
            kept = self._positions(turn, job)
            states = dict(self._snapshots(turn, job, kept))
            self._counters.add("snapshots_stored", len(states))
            fresh |= states
        else:
            kept, states = (), {}
            fresh |= self._tail(turn, job)
        state_bytes = self._state_bytes(turn, kept, states)
        return Encoded(fresh, kept, self._run_bytes(turn) + state_bytes, state_bytes)

    def _chunks(self, turn: Turn, job: SaveJob) -> Iterator[tuple[bytes, bytes]]:
        """Full chunks that no tier holds. Few are in flight, so that a restore never waits long."""
        names = turn.chain.chunk_keys if self._keys.growing else []
        places = self._stack.locate(names).places
        waiting: deque[tuple[bytes, Future[bytes]]] = deque()
        for i, key in enumerate(names):
            if places[i] is not None:
                continue
            if len(waiting) >= self._workers.num_threads:
                done, blob = waiting.popleft()
                yield done, blob.result()
            first = i * self._size
            run = slice_tokens(job.run, first, first + self._size)
            waiting.append((key, self._workers.codec(self._packer.pack_chunk, key, run, first)))
        for key, blob in waiting:
            yield key, blob.result()

    def _tail(self, turn: Turn, job: SaveJob) -> dict[bytes, bytes]:
        first = turn.chain.num_chunks * self._size
        if first == len(turn.tokens):
            return {}
        key = turn.chain.tail_key(turn.session.tenant, turn.session.id)
        run = slice_tokens(job.run, first, len(turn.tokens))
        return {key: self._packer.pack_tail(key, run, first)}

    def _positions(self, turn: Turn, job: SaveJob) -> tuple[int, ...]:
        old = turn.old.snapshots if turn.old else ()
        still_true = [x for x in old if x <= turn.common]
        held = self._stack.locate([turn.chain.snapshot_key(x) for x in still_true])
        # A tier that does not answer is no reason to give a state up.
        gone = [place is None and not held.down for place in held.places]
        there = [x for x, lost in zip(still_true, gone, strict=True) if not lost]
        new = [x.position for x in job.snapshots if 0 < x.position <= len(turn.tokens)]
        return kept_positions(there, new, self._max_snapshots)

    def _snapshots(
        self, turn: Turn, job: SaveJob, kept: tuple[int, ...]
    ) -> Iterator[tuple[bytes, bytes]]:
        for snapshot in job.snapshots:
            position = snapshot.position
            if position not in kept:
                continue
            key = turn.chain.snapshot_key(position)
            if self._stack.locate([key]).places[0] is None:
                first = position // self._size * self._size
                run = slice_tokens(job.run, first, position)
                blob = self._packer.pack_snapshot(key, snapshot.state, run, first, position - first)
                yield key, blob

    def _run_bytes(self, turn: Turn) -> int:
        """Of chunks and tail."""
        num_chunks = turn.chain.num_chunks if self._keys.growing else 0
        total = self._packer.chunk_nbytes(0, self._size) if num_chunks else 0
        if num_chunks > 1:
            total += (num_chunks - 1) * self._packer.chunk_nbytes(self._size, self._size)
        behind = 0 if self._keys.needs_state else len(turn.tokens) % self._size
        return total + (self._packer.tail_nbytes(behind) if behind else 0)

    def _state_bytes(self, turn: Turn, kept: tuple[int, ...], states: dict[bytes, bytes]) -> int:
        """States of one session are about equally large, so those not seen now are estimated."""
        if states:
            return len(kept) * sum(map(len, states.values())) // len(states)
        old = turn.old
        return old.state_bytes * len(kept) // len(old.snapshots) if old and old.snapshots else 0
