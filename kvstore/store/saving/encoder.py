"""Packs one turn's live KV into the blobs that no tier holds yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from kvstore.blobs.chain import Chain, common_prefix
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.packer import Packer
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.codecs.base import Codec
from kvstore.kept_states import by_worth, kept_states
from kvstore.ledger.ledger import Ledger
from kvstore.shapes import slice_tokens
from kvstore.store.records import SessionRecord
from kvstore.store.saving.older_copies import OlderCopies, OlderRun
from kvstore.store.saving.save_queue import SaveJob
from kvstore.store.spans import Span
from kvstore.store.token_keys import TokenKeys
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class Turn:
    """A save, with the chain of its tokens and the session's older record."""

    job: SaveJob
    root: bytes
    chain: Chain
    old: SessionRecord | None

    @cached_property
    def common(self) -> int:
        """Count the leading tokens of the older record that are unchanged."""
        if self.old is None or self.old.root != self.root:
            return 0
        return common_prefix(self.old.tokens, self.job.tokens)


@dataclass(frozen=True)
class Encoded:
    fresh: dict[bytes, Blob]  # new blobs by key, in the order of their tokens
    spans: list[Span]  # those among them that hold rows and nothing else
    codec: Codec  # the one that packed them
    codecs: CodecSet  # those in use when encoding began
    snapshots: tuple[int, ...]  # positions that the session keeps
    states: tuple[int, ...]  # of these, those whose blobs are among the fresh ones
    # For each run with restored rows, by its first token: the surviving packed copies it continues.
    lineages: dict[int, Lineage]


class Encoder:
    """Thread-safe; called on the saving thread, works on the codec threads."""

    def __init__(
        self, ledger: Ledger[SessionRecord], packer: Packer, keys: TokenKeys, max_snapshots: int
    ) -> None:
        self._stack = ledger.stack
        self._index = ledger.index
        self._workers = ledger.workers
        self._counters = ledger.counters
        self._packer = packer
        self._keys = keys
        self._older = OlderCopies(ledger.stack, packer)
        self._max_snapshots = max_snapshots
        self._size = keys.space.chunk_tokens

    def encode(self, turn: Turn) -> Encoded:
        """Pack all new blobs in the codec of the fastest tier."""
        codecs = self._packer.codecs
        spans = self._keys.rows(turn.chain, turn.job.session.tenant, turn.job.session.id)
        levels = self._stack.locate([x.key for x in spans]).levels
        missing = [x for x, level in zip(spans, levels, strict=True) if level is None]
        codec = codecs.on(self._stack.names)[0]
        positions = self._positions(turn) if self._keys.needs_state else ()
        firsts = {*(x.first_token for x in missing), *map(self._chunk_start, positions)}
        lineages = self._lineages(turn, firsts, codec)
        fresh = self._packed(turn, missing, codec, lineages, self._workers.num_threads)
        chunks = [x for x in missing if x.is_chunk]
        kept = sum(x.first_token < turn.job.lossy_tokens for x in chunks)
        self._counters.add("chunks_encoded", len(chunks) - kept)
        self._counters.add("chunks_kept", kept)
        new_states = self._new_states(turn, positions)
        states = dict(self._packed_snapshots(turn, new_states, codecs, codec, lineages))
        self._counters.add("snapshots_stored", len(states))
        return Encoded(
            fresh | states,
            missing,
            codec,
            codecs,
            positions,
            new_states,
            lineages,
        )

    def others(self, encoded: Encoded) -> list[Codec]:
        """List the other codecs to pack the turn in, for the slower tiers."""
        packs = encoded.spans or encoded.states
        return list(encoded.codecs.on(self._stack.names)[1:]) if packs else []

    def encode_again(self, turn: Turn, encoded: Encoded, codec: Codec) -> dict[bytes, Blob]:
        """Pack the same blobs from the same rows for a tier with another codec."""
        own = self._lineages(turn, encoded.lineages, codec)
        # This tier may lack a copy in its codec, and the fastest one has dropped the older tail.
        lineages = {
            first: own[first] if own[first].segments else there
            for first, there in encoded.lineages.items()
        }
        runs = self._packed(turn, encoded.spans, codec, lineages, self._workers.num_spare)
        states = self._packed_snapshots(turn, encoded.states, encoded.codecs, codec, lineages)
        return encoded.fresh | runs | dict(states)

    def _chunk_start(self, token: int) -> int:
        return token - token % self._size

    def _packed(
        self,
        turn: Turn,
        spans: Sequence[Span],
        codec: Codec,
        lineages: Mapping[int, Lineage],
        at_once: int,
    ) -> dict[bytes, Blob]:
        """Pack chunks and tail on the codec threads; return the blobs by key."""
        pack = self._packer.pack_run

        def packing(x: Span) -> Callable[[], Blob]:
            run, first = slice_tokens(turn.job.run, x.first_token, x.end_token), x.first_token
            return partial(pack, x.key, run, first, codec, lineages.get(first, FRESH))

        return self._workers.few_at_once(((x.key, packing(x)) for x in spans), at_once)

    def _lineages(self, turn: Turn, firsts: Iterable[int], codec: Codec) -> dict[int, Lineage]:
        """Find the surviving lossy copies that runs with restored rows continue.

        ``firsts``: the first tokens of runs, which are the first tokens of chunks.
        """
        lossy = [x for x in firsts if x < turn.job.lossy_tokens]
        old = turn.old if lossy and not codec.exact else None
        spans, common = self._keys.spans(old) if old else [], turn.common
        rows = {x: self._older.rows(_older_runs(spans, x, common), codec.id) for x in lossy}
        return {x: Lineage(turn.job.lossy_tokens, rows[x], common) for x in lossy}

    def _positions(self, turn: Turn) -> tuple[int, ...]:
        old = turn.old.snapshots if turn.old else ()
        still_true = [x for x in old if x <= turn.common]
        held = self._stack.locate([turn.chain.snapshot_key(x) for x in still_true])
        # A state is not given up because a tier does not answer.
        gone = [level is None and not held.down for level in held.levels]
        there = [x for x, lost in zip(still_true, gone, strict=True) if not lost]
        new = [x.position for x in turn.job.snapshots if 0 < x.position <= len(turn.job.tokens)]
        own = kept_states([*there, *new], self._max_snapshots)
        return (*self._shared_beginning(turn, {*there, *new}.difference(own)), *own)

    def _shared_beginning(self, turn: Turn, others: Iterable[int]) -> list[int]:
        """Find the furthest of these states whose beginning another session also has.

        That is often the end of a system prompt. Many sessions start from it, and its state is
        stored once for all of them: the next session with that beginning finds it and stores none.
        """
        chunks = turn.chain.chunk_keys if self._keys.growing else []
        for position in by_worth(others):
            last = chunks[: position // self._size][-1:]
            if last and not self._index.unshared(last, turn.job.key):
                return [position]
        return []

    def _new_states(self, turn: Turn, kept: tuple[int, ...]) -> tuple[int, ...]:
        """Find those of the states to keep that this turn has and no tier has."""
        new = sorted({x.position for x in turn.job.snapshots}.intersection(kept))
        levels = self._stack.locate([turn.chain.snapshot_key(x) for x in new]).levels
        return tuple(x for x, level in zip(new, levels, strict=True) if level is None)

    def _packed_snapshots(
        self,
        turn: Turn,
        positions: Sequence[int],
        codecs: CodecSet,
        codec: Codec,
        lineages: Mapping[int, Lineage],
    ) -> Iterator[tuple[bytes, Blob]]:
        """Yield the blobs of states, by key; ``lineages`` are those of rows."""
        lineage = self._lineage(turn) if positions else FRESH
        for snapshot in {x.position: x for x in turn.job.snapshots}.values():
            position = snapshot.position
            if position not in positions:
                continue
            span = self._keys.state(turn.chain, position)
            blob = self._packer.pack_snapshot(
                span.key,
                snapshot.state,
                slice_tokens(turn.job.run, span.first_token, position),
                span.first_token,
                span.num_tokens,
                codec=codec,
                rows=lineages.get(span.first_token, FRESH),
                how=codecs.sessions.get(codec.id),
                lineage=lineage,
            )
            yield span.key, blob

    def _lineage(self, turn: Turn) -> Lineage:
        """Find the surviving segments of the lossy state that this session was restored from."""
        position = min(turn.job.lossy_state, len(turn.job.tokens))
        if not position:
            return FRESH
        old = turn.old.snapshots if turn.old else ()
        known = by_worth({position, *(x for x in old if x <= turn.common)})
        spans = [self._keys.state(turn.chain, x) for x in known]
        return Lineage(position, [x for span in spans for x in self._older.windows(span)])


def _older_runs(old: Sequence[Span], first: int, common: int) -> list[OlderRun]:
    """Choose those of a session's older spans that have rows from ``first``, a chunk's start, on.

    That is one chunk or the tail, or the states since the last full chunk. ``common``: the leading
    tokens that are unchanged.
    """
    spans = [x for x in old if x.first_token == first < min(x.end_token, common)]
    rows = [x for x in spans if not x.is_state]
    states = [x for x in spans if x.end_token <= common]
    return [OlderRun(x, min(x.end_token, common)) for x in rows or states]
