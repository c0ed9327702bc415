"""From one turn's live KV to the blobs that no tier holds yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.packer import Packer
from kvstore.blobs.state_packer import FRESH, Lineage, Segment
from kvstore.by_tokens.keys import KeyMaker
from kvstore.by_tokens.records import SessionRecord
from kvstore.by_tokens.reviser import SessionUpdate
from kvstore.by_tokens.save_queue import SaveJob
from kvstore.codecs.base import Codec
from kvstore.codecs.states.session_codec import SessionCodec
from kvstore.errors import TierUnavailable, Unusable
from kvstore.kept_states import by_worth, kept_states
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.record import bytes_of_leading
from kvstore.shapes import KVRun, slice_tokens


@dataclass(frozen=True)
class Encoded:
    fresh: dict[bytes, bytes]  # new blobs by key, in the order of their tokens
    chunks: list[int]  # numbers of those among them that a codec packed
    codec: Codec  # the one
    codecs: CodecSet  # of the moment when it began
    snapshots: tuple[int, ...]  # positions that the session keeps
    states: tuple[int, ...]  # of these, those whose blobs are among the fresh ones
    packed_bytes: int  # of all the session's blobs in the fastest tier; about, of older ones
    state_bytes: int  # of these, snapshots


class Encoder:
    """Thread-safe; called on the saving thread, works on the codec threads."""

    def __init__(
        self, ledger: Ledger[SessionRecord], packer: Packer, keys: KeyMaker, max_snapshots: int
    ) -> None:
        self._stack = ledger.stack
        self._index = ledger.index
        self._workers = ledger.workers
        self._counters = ledger.counters
        self._packer = packer
        self._keys = keys
        self._max_snapshots = max_snapshots
        self._size = keys.space.chunk_tokens

    def encode(self, update: SessionUpdate, job: SaveJob) -> Encoded:
        """All that is new, in the codec of the fastest tier."""
        codecs = self._packer.codecs
        names = update.chain.chunk_keys if self._keys.growing else []
        levels = self._stack.locate(names).levels
        missing = [i for i, level in enumerate(levels) if level is None]
        exact = [i for i in missing if i * self._size >= job.lossy_tokens]
        fresh = self._restored(update, job, missing[: len(missing) - len(exact)])
        codec = codecs.on(self._stack.names)[0]
        fresh |= self._packed(update, job, exact, codec, self._workers.num_threads)
        self._counters.add("chunks_encoded", len(exact))
        self._counters.add("chunks_kept", len(missing) - len(exact))
        chunks = dict(fresh)
        if self._keys.needs_state:
            kept = self._positions(update, job)
            states = dict(self._snapshots(update, job, kept, codecs.sessions.get(codec.id)))
            self._counters.add("snapshots_stored", len(states))
            fresh |= states
            packed = tuple(x for x in kept if update.chain.snapshot_key(x) in states)
        else:
            kept, states, packed = (), {}, ()
            fresh |= self._tail(update, job)
        state_bytes = self._state_bytes(update, kept, states)
        packed_bytes = self._run_bytes(update, chunks) + state_bytes
        return Encoded(fresh, exact, codec, codecs, kept, packed, packed_bytes, state_bytes)

    def others(self, encoded: Encoded) -> list[Codec]:
        """List the other codecs to pack it by, for the slower tiers."""
        packs = encoded.chunks or (encoded.states and encoded.codecs.sessions)
        return list(encoded.codecs.on(self._stack.names)[1:]) if packs else []

    def encode_again(
        self, update: SessionUpdate, job: SaveJob, encoded: Encoded, codec: Codec
    ) -> dict[bytes, bytes]:
        """The same for a tier that packs by another codec, from the same rows."""
        at_once = self._workers.num_spare
        chunks = self._packed(update, job, encoded.chunks, codec, at_once)
        how = encoded.codecs.sessions.get(codec.id)
        states = self._packed_snapshots(update, job, encoded.states, how)
        return encoded.fresh | chunks | dict(states)

    def _packed(
        self, update: SessionUpdate, job: SaveJob, chunks: Sequence[int], codec: Codec, at_once: int
    ) -> dict[bytes, bytes]:
        """Blobs of full chunks, by key; the codec threads pack them."""
        keys, pack = update.chain.chunk_keys, self._packer.pack_chunk
        calls = (
            (keys[i], partial(pack, keys[i], self._run(job, i), i * self._size, codec))
            for i in chunks
        )
        return self._workers.few_at_once(calls, at_once)

    def _restored(
        self, update: SessionUpdate, job: SaveJob, chunks: Sequence[int]
    ) -> dict[bytes, bytes]:
        """Full chunks with rows that a lossy codec has been at: not given to one again."""
        names, pack = update.chain.chunk_keys, self._packer.pack_restored
        return {names[i]: pack(names[i], self._run(job, i), i * self._size) for i in chunks}

    def _run(self, job: SaveJob, chunk: int) -> KVRun:
        first = chunk * self._size
        return slice_tokens(job.run, first, first + self._size)

    def _tail(self, update: SessionUpdate, job: SaveJob) -> dict[bytes, bytes]:
        first = update.chain.num_chunks * self._size
        if first == len(update.tokens):
            return {}
        key = update.chain.tail_key(update.session.tenant, update.session.id)
        run = slice_tokens(job.run, first, len(update.tokens))
        restored = job.lossy_tokens > first
        return {key: self._packer.pack_tail(key, run, first, restored=restored)}

    def _positions(self, update: SessionUpdate, job: SaveJob) -> tuple[int, ...]:
        old = update.old.snapshots if update.old else ()
        still_true = [x for x in old if x <= update.common]
        held = self._stack.locate([update.chain.snapshot_key(x) for x in still_true])
        # A tier that does not answer is no reason to give a state up.
        gone = [level is None and not held.down for level in held.levels]
        there = [x for x, lost in zip(still_true, gone, strict=True) if not lost]
        new = [x.position for x in job.snapshots if 0 < x.position <= len(update.tokens)]
        own = kept_states([*there, *new], self._max_snapshots)
        return (*self._shared_beginning(update, job, {*there, *new}.difference(own)), *own)

    def _shared_beginning(
        self, update: SessionUpdate, job: SaveJob, others: Iterable[int]
    ) -> list[int]:
        """Find the furthest of these states whose beginning another session has, too.

        That is the end of a system prompt, often. Many sessions start from it, and it is stored
        once for all of them: the next one to begin so finds it and stores none.
        """
        chunks = update.chain.chunk_keys if self._keys.growing else []
        for position in by_worth(others):
            last = chunks[: position // self._size][-1:]
            if last and not self._index.unshared(last, job.key):
                return [position]
        return []

    def _snapshots(
        self, update: SessionUpdate, job: SaveJob, kept: tuple[int, ...], how: SessionCodec | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Blobs of states that no tier has."""
        new = {x.position for x in job.snapshots}.intersection(kept)
        keys = {x: update.chain.snapshot_key(x) for x in sorted(new)}
        missing = [x for x, key in keys.items() if self._stack.locate([key]).levels[0] is None]
        return self._packed_snapshots(update, job, missing, how)

    def _packed_snapshots(
        self,
        update: SessionUpdate,
        job: SaveJob,
        positions: Sequence[int],
        how: SessionCodec | None,
    ) -> Iterator[tuple[bytes, bytes]]:
        lineage = self._lineage(update, job) if positions else FRESH
        for snapshot in {x.position: x for x in job.snapshots}.values():
            position = snapshot.position
            if position not in positions:
                continue
            key = update.chain.snapshot_key(position)
            first = position // self._size * self._size
            run = slice_tokens(job.run, first, position)
            yield (
                key,
                self._packer.pack_snapshot(
                    key,
                    snapshot.state,
                    run,
                    first,
                    position - first,
                    restored=job.lossy_tokens > first,
                    how=how,
                    lineage=lineage,
                ),
            )

    def _lineage(self, update: SessionUpdate, job: SaveJob) -> Lineage:
        """Find what is still there of the lossy state that this session came back from."""
        position = min(job.lossy_state, len(update.tokens))
        if not position:
            return FRESH
        old = update.old.snapshots if update.old else ()
        known = by_worth({position, *(x for x in old if x <= update.common)})
        return Lineage(position, [x for at in known for x in self._segments_at(update, at)])

    def _segments_at(self, update: SessionUpdate, position: int) -> list[Segment]:
        """Read the packed windows of a stored state; none where it is gone."""
        key = update.chain.snapshot_key(position)
        level = self._stack.locate([key]).levels[0]
        if level is None:
            return []
        first = position // self._size * self._size
        try:
            blob = self._stack.get(level, [key])[0]
            if blob is None:
                return []
            return self._packer.segments_of(blob, key, first, position - first)
        except (Unusable, TierUnavailable):
            return []

    def _run_bytes(self, update: SessionUpdate, fresh: Mapping[bytes, bytes]) -> int:
        """Count the bytes of chunks and tail. Older chunks are in the codec of their own save."""
        names = update.chain.chunk_keys if self._keys.growing else []
        known, total = self._known_bytes(update)
        for i, name in enumerate(names[known:], known):
            at = i * self._size
            blob = fresh.get(name)
            total += self._packer.chunk_nbytes(at, self._size) if blob is None else len(blob)
        behind = 0 if self._keys.needs_state else len(update.tokens) % self._size
        return total + (self._packer.tail_nbytes(behind) if behind else 0)

    def _known_bytes(self, update: SessionUpdate) -> tuple[int, int]:
        """Count the leading chunks that the older record has, too, and their bytes."""
        old, known = update.old, update.common // self._size
        if old is None or not known or not self._keys.growing:
            return 0, 0
        tail_bytes = (
            0 if self._keys.needs_state else self._packer.tail_nbytes(old.tail_tokens, old.codecs)
        )
        rest = old.state_bytes + (tail_bytes if old.tail_tokens else 0)
        num_chunks = old.num_tokens // self._size
        return known, bytes_of_leading(known, num_chunks, old.packed_bytes, rest)

    def _state_bytes(
        self, update: SessionUpdate, kept: tuple[int, ...], states: dict[bytes, bytes]
    ) -> int:
        """States of one session are about equally large, so those not seen now are estimated."""
        if states:
            return len(kept) * sum(map(len, states.values())) // len(states)
        old = update.old
        return old.state_bytes * len(kept) // len(old.snapshots) if old and old.snapshots else 0
