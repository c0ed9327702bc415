"""Packs one turn's live KV into the blobs that no tier holds yet, never a row twice with loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from kvstore.blobs.chain import Chain, common_prefix
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.packer import Packer
from kvstore.blobs.segments import FRESH, Lineage, Segment
from kvstore.codecs.base import Codec
from kvstore.errors import TierUnavailable, Unusable
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.stack import TierStack
from kvstore.session import by_worth, kept_states
from kvstore.shapes import slice_tokens
from kvstore.store.records import SessionRecord, Span
from kvstore.store.save_queue import SaveJob
from kvstore.store.token_keys import TokenKeys
from kvstore.tiers.base import Blob
from kvstore.workers import Workers


class OlderRun(NamedTuple):
    """A stored span whose rows another blob continues.

    ``shared_end``: the tokens of the two differ from this one on.
    """

    span: Span
    shared_end: int


class OlderCopies:
    """Finds packed rows and windows in the tiers, as they are; none of lost blobs. Thread-safe."""

    def __init__(self, stack: TierStack, packer: Packer) -> None:
        self._stack = stack
        self._packer = packer

    def rows(self, runs: Iterable[OlderRun], codec_id: str) -> list[Segment]:
        """List the segments of these runs that were packed with loss.

        Of several copies the one in the codec of this id is preferred.
        """
        return [x for run in runs for x in self._rows(run, codec_id)]

    def windows(self, span: Span) -> list[Segment]:
        """List the packed windows of a stored state."""
        level = self._stack.locate([span.key]).levels[0]
        if level is None:
            return []
        try:
            blob = self._stack.get(level, [span.key])[0]
            if blob is None:
                return []
            return self._packer.segments_of(blob, span.key, span.first_token, span.num_tokens)
        except (Unusable, TierUnavailable):
            return []

    def _rows(self, run: OlderRun, codec_id: str) -> list[Segment]:
        first: list[Segment] = []
        for level in range(len(self._stack)):
            blob = self._stack.find(level, [run.span.key])[0]
            try:
                found = self._shared_segments(blob, run) if blob is not None else []
            except Unusable:  # a restore finds that, too, and removes the copy
                continue
            if found and all(x.codec_id == codec_id for x in found):
                return found
            first = first or found
        return first

    def _shared_segments(self, blob: Blob, run: OlderRun) -> list[Segment]:
        span, end = run
        found = self._packer.lossy_segments(blob, span.key, span.first_token, span.num_tokens)
        return [x.cut(end) for x in found if x.first < end]


class ToPack(NamedTuple):
    """A new blob, as any codec can pack it.

    ``lineage`` finds the surviving lossy copies that its rows continue; ``pack`` takes them.
    """

    span: Span
    pack: Callable[[Codec, Lineage], Blob]
    lineage: Callable[[Codec], Lineage]


def pack_again(
    workers: Workers, wanted: Iterable[ToPack], first: Mapping[Span, Lineage], codec: Codec
) -> dict[bytes, Blob]:
    """Pack the same blobs from the same rows, a few at a time; return them by key.

    ``first``: the lineages by which they were packed before. They are used again where the search
    finds nothing: a slower tier may lack a copy in its codec, and the fastest one has dropped the
    older tail.
    """

    def call(x: ToPack) -> Callable[[], Blob]:
        own = x.lineage(codec)
        return partial(x.pack, codec, own if own.segments else first.get(x.span, FRESH))

    return workers.few_at_once(((x.span.key, call(x)) for x in wanted), workers.num_spare)


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
    wanted: list[ToPack]  # the same, to be packed by other codecs; refers to the engine's memory
    lineages: dict[Span, Lineage]  # by which they were packed
    codecs: CodecSet  # those in use when encoding began
    snapshots: tuple[int, ...]  # positions that the session keeps


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
        job, codecs = turn.job, self._packer.codecs
        positions = self._positions(turn) if self._keys.needs_state else ()
        states = {x.position: x.state for x in job.snapshots if x.position in positions}
        spans = self._keys.rows(turn.chain, job.session.tenant, job.session.id)
        spans += [self._keys.state(turn.chain, x) for x in sorted(states)]
        levels = self._stack.locate([x.key for x in spans]).levels
        missing = [x for x, level in zip(spans, levels, strict=True) if level is None]
        old = self._keys.spans(turn.old) if turn.old and job.lossy_tokens else []
        of_state = self._lineage(turn) if any(x.is_state for x in missing) else FRESH

        def to_pack(span: Span) -> ToPack:
            first, count = span.first_token, span.num_tokens
            run = slice_tokens(job.run, first, span.end_token)

            def pack(codec: Codec, rows: Lineage) -> Blob:
                if not span.is_state:
                    return self._packer.pack_run(span.key, run, first, codec, rows)
                return self._packer.pack_snapshot(
                    span.key,
                    states[span.end_token],
                    run,
                    first,
                    count,
                    codec=codec,
                    rows=rows,
                    how=codecs.sessions.get(codec.id),
                    lineage=of_state,
                )

            return ToPack(span, pack, partial(self._row_lineage, turn, old, first))

        wanted, codec = [to_pack(x) for x in missing], codecs.on(self._stack.names)[0]
        lineages = {x.span: x.lineage(codec) for x in wanted}
        calls = ((x.span.key, partial(x.pack, codec, lineages[x.span])) for x in wanted)
        fresh = self._workers.few_at_once(calls, self._workers.num_threads)
        chunks = [x for x in missing if x.is_chunk]
        kept = sum(x.first_token < job.lossy_tokens for x in chunks)
        self._counters.add("chunks_encoded", len(chunks) - kept)
        self._counters.add("chunks_kept", kept)
        self._counters.add("snapshots_stored", sum(x.is_state for x in missing))
        return Encoded(fresh, wanted, lineages, codecs, positions)

    def _row_lineage(self, turn: Turn, old: Sequence[Span], first: int, codec: Codec) -> Lineage:
        """Find the surviving lossy copies that the rows from ``first``, a chunk's start, continue.

        ``old``: the spans of the older record.
        """
        if first >= turn.job.lossy_tokens:
            return FRESH
        older = [] if codec.exact else _older_runs(old, first, turn.common)
        return Lineage(turn.job.lossy_tokens, self._older.rows(older, codec.id), turn.common)

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
