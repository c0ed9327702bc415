"""From one turn's live KV to the blobs that no tier holds yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvstore.codec_set import CodecSet
from kvstore.codecs.base import Codec
from kvstore.packer import Packer
from kvstore.revision import Turn, kept_positions
from kvstore.save_queue import SaveJob
from kvstore.session_keys import KeyMaker
from kvstore.shapes import KVRun, slice_tokens
from kvstore.stats import Counters
from kvstore.tier_stack import TierStack
from kvstore.workers import Workers


@dataclass(frozen=True)
class Encoded:
    fresh: dict[bytes, bytes]  # new blobs by key, in the order of their tokens
    chunks: list[int]  # numbers of those among them that a codec packed
    codec: Codec  # the one
    codecs: CodecSet  # of the moment when it began
    snapshots: tuple[int, ...]  # positions that the session keeps
    packed_bytes: int  # of all the session's blobs in the fastest tier; about, of older ones
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
        """All that is new, in the codec of the fastest tier."""
        codecs = self._packer.codecs
        names = turn.chain.chunk_keys if self._keys.growing else []
        places = self._stack.locate(names).places
        missing = [i for i, place in enumerate(places) if place is None]
        exact = [i for i in missing if i * self._size >= job.lossy_tokens]
        fresh = self._restored(turn, job, missing[: len(missing) - len(exact)])
        codec = codecs.on(self._stack.names)[0]
        fresh |= self._packed(turn, job, exact, codec, self._workers.num_threads)
        self._counters.add("chunks_encoded", len(exact))
        self._counters.add("chunks_kept", len(missing) - len(exact))
        chunks = dict(fresh)
        if self._keys.needs_state:
            kept = self._positions(turn, job)
            states = dict(self._snapshots(turn, job, kept))
            self._counters.add("snapshots_stored", len(states))
            fresh |= states
        else:
            kept, states = (), {}
            fresh |= self._tail(turn, job)
        state_bytes = self._state_bytes(turn, kept, states)
        packed_bytes = self._run_bytes(turn, chunks) + state_bytes
        return Encoded(fresh, exact, codec, codecs, kept, packed_bytes, state_bytes)

    def others(self, encoded: Encoded) -> list[Codec]:
        """Which other codecs there are to pack it by, for the slower tiers."""
        return list(encoded.codecs.on(self._stack.names)[1:]) if encoded.chunks else []

    def encode_again(
        self, turn: Turn, job: SaveJob, encoded: Encoded, codec: Codec
    ) -> dict[bytes, bytes]:
        """The same for a tier that packs by another codec, from the same rows."""
        at_once = max(1, self._workers.num_threads - 1)  # a thread is left for restores
        return encoded.fresh | self._packed(turn, job, encoded.chunks, codec, at_once)

    def _packed(
        self, turn: Turn, job: SaveJob, chunks: Sequence[int], codec: Codec, at_once: int
    ) -> dict[bytes, bytes]:
        """Few are in flight, so that a restore never waits long."""
        names = turn.chain.chunk_keys
        waiting: deque[tuple[bytes, Future[bytes]]] = deque()
        done: dict[bytes, bytes] = {}
        for i in chunks:
            if len(waiting) >= at_once:
                key, blob = waiting.popleft()
                done[key] = blob.result()
            pack = self._packer.pack_chunk
            blob = self._workers.codec(pack, names[i], self._run(job, i), i * self._size, codec)
            waiting.append((names[i], blob))
        return done | {key: blob.result() for key, blob in waiting}

    def _restored(self, turn: Turn, job: SaveJob, chunks: Sequence[int]) -> dict[bytes, bytes]:
        """Full chunks with rows that a lossy codec has been at: not given to one again."""
        names, pack = turn.chain.chunk_keys, self._packer.pack_restored
        return {names[i]: pack(names[i], self._run(job, i), i * self._size) for i in chunks}

    def _run(self, job: SaveJob, chunk: int) -> KVRun:
        first = chunk * self._size
        return slice_tokens(job.run, first, first + self._size)

    def _tail(self, turn: Turn, job: SaveJob) -> dict[bytes, bytes]:
        first = turn.chain.num_chunks * self._size
        if first == len(turn.tokens):
            return {}
        key = turn.chain.tail_key(turn.session.tenant, turn.session.id)
        run = slice_tokens(job.run, first, len(turn.tokens))
        restored = job.lossy_tokens > first
        return {key: self._packer.pack_tail(key, run, first, restored=restored)}

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
                restored = job.lossy_tokens > first
                count = position - first
                pack = self._packer.pack_snapshot
                yield key, pack(key, snapshot.state, run, first, count, restored=restored)

    def _run_bytes(self, turn: Turn, fresh: Mapping[bytes, bytes]) -> int:
        """Of chunks and tail. What the session had before is in the codec that it was saved in."""
        names = turn.chain.chunk_keys if self._keys.growing else []
        known, total = self._known_bytes(turn)
        for i, name in enumerate(names[known:], known):
            at = i * self._size
            blob = fresh.get(name)
            total += self._packer.chunk_nbytes(at, self._size) if blob is None else len(blob)
        behind = 0 if self._keys.needs_state else len(turn.tokens) % self._size
        return total + (self._packer.tail_nbytes(behind) if behind else 0)

    def _known_bytes(self, turn: Turn) -> tuple[int, int]:
        """How many leading chunks the older record has, too, and their bytes."""
        old, known = turn.old, turn.common // self._size
        if old is None or not known or not self._keys.growing:
            return 0, 0
        tail_bytes = (
            0 if self._keys.needs_state else self._packer.tail_nbytes(old.tail_tokens, old.codecs)
        )
        total = old.packed_bytes - old.state_bytes - (tail_bytes if old.tail_tokens else 0)
        return known, max(total, 0) * known // (old.num_tokens // self._size)

    def _state_bytes(self, turn: Turn, kept: tuple[int, ...], states: dict[bytes, bytes]) -> int:
        """States of one session are about equally large, so those not seen now are estimated."""
        if states:
            return len(kept) * sum(map(len, states.values())) // len(states)
        old = turn.old
        return old.state_bytes * len(kept) // len(old.snapshots) if old and old.snapshots else 0
