"""Reading a match back into live KV.

Blobs are read in batches, a few ahead of the codec threads, and each is verified and decoded by a
codec thread straight into its place in the final arrays. A blob that is missing or damaged in one
tier is looked for in the others; where none has it, the tokens before it are still good. When time
runs out, whatever came first is kept: prefill does the rest.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from kvstore.chain import SNAPSHOT, TAIL, Tokens, no_tokens
from kvstore.errors import ForeignCodec, TierUnavailable, Unusable
from kvstore.matcher import Match, Piece
from kvstore.packer import Packer
from kvstore.records import MissReason, TierName
from kvstore.shapes import KVPair, KVRun, slice_tokens
from kvstore.snapshot import StateTree
from kvstore.stats import Counters
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob
from kvstore.workers import Workers

T = TypeVar("T")
READ_BATCH: Final = 8  # blobs per call to a tier
READS_AHEAD: Final = 2  # batches being read while earlier ones are decoded

# What a tier said when asked for a blob.
Answer: TypeAlias = Blob | TierUnavailable | None

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """The KV of ``tokens``, (num_tokens,) int32, as the engine wants it.

    ``run``: per growing layer K and V, (num_kv_heads, num_tokens, head_dim), the engine's dtype
    (bf16 as uint16), C-contiguous, the receiver's to keep. ``state``: for a cache that cannot be
    cut, its state after exactly these tokens. ``tier``: the slowest that was read. ``reason``: why
    fewer tokens than the match promised. ``lossy_tokens``: behind so many there is nothing that a
    lossy codec has been at; whoever saves these rows again says so.
    """

    num_tokens: int
    run: list[KVPair] = field(repr=False)
    state: StateTree = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    tokens: Tokens = field(default_factory=no_tokens, repr=False)
    lossy_tokens: int = 0


@dataclass(frozen=True)
class _Outcome:
    """What became of one piece: where it was read in the end, or why it could not be."""

    piece: Piece
    place: int | None
    blob: Blob | None = None
    state: StateTree = None
    reason: MissReason | None = None


class Restorer:
    """Thread-safe; every ``load`` works on arrays of its own."""

    def __init__(
        self,
        stack: TierStack,
        packer: Packer,
        workers: Workers,
        counters: Counters,
        monotonic: Callable[[], float],
    ) -> None:
        self._stack = stack
        self._packer = packer
        self._workers = workers
        self._counters = counters
        self._monotonic = monotonic

    def load(self, match: Match, deadline_s: float) -> tuple[Restored, list[tuple[bytes, Blob]]]:
        """The restored prefix, and those of its blobs that the fastest tier lacks."""
        give_up_at = self._monotonic() + deadline_s
        out = self._packer.layout.empty(match.num_tokens)
        decodes = self._start_decoding(match.pieces, out, give_up_at)
        good, reason = self._leading_good(decodes, len(match.pieces), give_up_at)
        for future in decodes:
            future.cancel()
        restored = self._assemble(match, good, out, reason)
        return restored, [(x.piece.key, x.blob) for x in good if x.place and x.blob is not None]

    # ---- reading

    def _start_decoding(
        self, pieces: Sequence[Piece], out: KVRun, give_up_at: float
    ) -> list[Future[_Outcome]]:
        """One future per piece, in order; fewer if reading took too long."""
        decodes: list[Future[_Outcome]] = []
        first = 0
        for batch, answers in self._read_ahead(pieces, give_up_at):
            for piece, answer in zip(batch, answers, strict=True):
                target = slice_tokens(out, first, first + piece.take)
                decodes.append(self._workers.codec(self._decode, piece, answer, target))
                first += piece.take
        return decodes

    def _read_ahead(
        self, pieces: Sequence[Piece], give_up_at: float
    ) -> Iterator[tuple[Sequence[Piece], list[Answer]]]:
        waiting = deque(pieces[i : i + READ_BATCH] for i in range(0, len(pieces), READ_BATCH))
        reads: deque[tuple[Sequence[Piece], Future[list[Answer]]]] = deque()
        while waiting or reads:
            while waiting and len(reads) < READS_AHEAD:
                batch = waiting.popleft()
                reads.append((batch, self._workers.read(self._read, batch)))
            batch, read = reads.popleft()
            answers = self._in_time(read, give_up_at)
            if answers is None:
                return
            yield batch, answers

    def _read(self, pieces: Sequence[Piece]) -> list[Answer]:
        """On a reader thread: neighbours that rest in the same tier with one call."""
        answers: list[Answer] = []
        for place, group in itertools.groupby(pieces, key=lambda x: x.place):
            keys = [x.key for x in group]
            try:
                answers += self._stack.get(place, keys)
            except TierUnavailable as error:
                answers += [error] * len(keys)
        return answers

    def _in_time(self, future: Future[T], give_up_at: float) -> T | None:
        """The result, or None if it does not come in time."""
        try:
            return future.result(timeout=max(give_up_at - self._monotonic(), 0.0))
        except TimeoutError:
            return None

    # ---- decoding, on a codec thread

    def _decode(self, piece: Piece, answer: Answer, target: KVRun) -> _Outcome:
        """From the planned tier, else from any other that has the blob."""
        reason: MissReason = "evicted"
        others = [i for i in range(len(self._stack)) if i != piece.place]
        for place in (piece.place, *others):
            try:
                found = answer if place == piece.place else self._stack.get(place, [piece.key])[0]
                if isinstance(found, TierUnavailable):
                    raise found
                if found is not None:
                    state = self._unpack(piece, found, target)
                    return _Outcome(piece, place, found, state)
            except TierUnavailable:
                reason = "unavailable" if reason == "evicted" else reason
            except ForeignCodec as error:  # it would only keep a readable one from being stored
                reason = "fingerprint"
                self._stack.delete(place, [piece.key])
                _log.warning("dropped a blob from %s: %s", self._stack.name(place), error)
            except Unusable as error:
                reason = "corrupt"
                self._discard(place, piece, error)
        return _Outcome(piece, None, reason=reason)

    def _unpack(self, piece: Piece, blob: Blob, target: KVRun) -> StateTree:
        key, first, count = piece.key, piece.first_token, piece.num_tokens
        if piece.kind == SNAPSHOT:
            return self._packer.unpack_snapshot(blob, key, first, count, target)
        if piece.kind == TAIL:
            self._packer.unpack_tail(blob, key, first, count, target)
        else:
            self._packer.unpack_chunk(blob, key, first, count, target)
        return None

    def _discard(self, place: int, piece: Piece, error: Unusable) -> None:
        _log.warning("dropped a bad blob from %s: %s", self._stack.name(place), error)
        self._counters.add("corrupt")
        self._stack.delete(place, [piece.key])

    # ---- putting together

    def _leading_good(
        self, decodes: list[Future[_Outcome]], num_pieces: int, give_up_at: float
    ) -> tuple[list[_Outcome], MissReason | None]:
        good: list[_Outcome] = []
        for future in decodes:
            outcome = self._in_time(future, give_up_at)
            if outcome is None:
                return good, "deadline"
            if outcome.place is None:
                return good, outcome.reason
            good.append(outcome)
        return good, None if len(good) == num_pieces else "deadline"

    def _assemble(
        self, match: Match, good: list[_Outcome], out: list[KVPair], reason: MissReason | None
    ) -> Restored:
        if reason is not None and match.pieces and match.pieces[-1].kind == SNAPSHOT:
            good = []  # without the state at its end, a run of tokens is of no use
        num_tokens = sum(x.piece.take for x in good)
        if num_tokens < match.num_tokens:
            # A late thread may still be writing behind the good prefix: give away a copy.
            out = [(k.copy(), v.copy()) for k, v in slice_tokens(out, 0, num_tokens)]
        places = [x.place for x in good if x.place is not None]
        tier = self._stack.name(max(places)) if places else None
        state = good[-1].state if good else None
        tokens = match.tokens[:num_tokens]
        return Restored(num_tokens, out, state, tier, reason, tokens, self._lossy_tokens(good))

    def _lossy_tokens(self, good: list[_Outcome]) -> int:
        ends = [0]
        for x in good:
            if x.blob is not None and self._packer.is_lossy(x.blob):
                ends.append(x.piece.first_token + x.piece.take)
        return max(ends)
