"""Restores the KV of a match.

Blobs are read in batches, a few ahead of the codec threads. A codec thread verifies and decodes
each blob straight into its place in the final arrays; the thread that waits for them decodes blobs
that no codec thread has begun. If a blob is missing or damaged in one tier, it is looked for in the
others. If no tier has it, the tokens before it are still good. When time runs out, the tokens read
so far are kept, and prefill computes the rest.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

from kvstore.blobs.chain import Tokens, no_tokens
from kvstore.blobs.packer import Packer
from kvstore.blobs.snapshot import StateTree
from kvstore.errors import TierUnavailable
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.reading import CopyReader
from kvstore.session import MissReason, TierName
from kvstore.shapes import KVPair, KVRun, slice_tokens
from kvstore.store.planner import BlobRead
from kvstore.store.records import SessionRecord
from kvstore.tiers.base import Blob

T = TypeVar("T")
READ_BATCH: Final = 8  # blobs per call to a tier
READS_AHEAD: Final = 2  # batches being read while earlier ones are decoded

# The result of asking a tier for a blob.
Answer: TypeAlias = Blob | TierUnavailable | None


@dataclass(frozen=True)
class Match:
    """The part of a prompt that can be restored. Cheap to make: only records were read, no blobs.

    ``tier`` is the slowest that must be read, None for a miss. ``reason``: why the rest of the KV
    that was once stored is not reusable; None if nothing was lost. ``tokens``, (num_tokens,) int32,
    are the tokens of the match: loading it needs no other source for the tokens of the KV.
    """

    num_tokens: int
    tier: TierName | None
    reason: MissReason | None
    reads: tuple[BlobRead, ...] = field(default=(), repr=False)
    record_key: bytes | None = field(default=None, repr=False)
    tokens: Tokens = field(default_factory=no_tokens, repr=False, compare=False)


@dataclass(frozen=True)
class Restored:
    """The KV of ``tokens``, (num_tokens,) int32, in the form that the engine uses.

    ``run``: per growing layer K and V, (num_kv_heads, num_tokens, head_dim), the engine's dtype
    (bf16 as uint16), C-contiguous; the receiver may keep it. ``state``: for a cache that cannot be
    cut, its state after exactly these tokens. ``tier``: the slowest that was read. ``reason``: why
    there are fewer tokens than the match promised. ``lossy_tokens``: no row from this token on was
    unpacked from a lossy codec; a caller that saves these rows again passes it on. ``lossy_state``:
    the same for the state: its position, or 0 if it is exact.
    """

    num_tokens: int
    run: list[KVPair] = field(repr=False)
    state: StateTree = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    tokens: Tokens = field(default_factory=no_tokens, repr=False)
    lossy_tokens: int = 0
    lossy_state: int = 0


@dataclass(frozen=True)
class _Outcome:
    """The result of one read: the copy that was good, or why there was none."""

    read: BlobRead
    level: int | None
    blob: Blob | None = None
    state: StateTree = None
    reason: MissReason | None = None


@dataclass
class _Decoding:
    """One read whose blob is being decoded by a codec thread, or waits for one."""

    future: Future[_Outcome]
    here: Callable[[], _Outcome]  # does the same on the thread that calls it


class Restorer:
    """Thread-safe; every ``load`` works on arrays of its own."""

    def __init__(self, ledger: Ledger[SessionRecord], packer: Packer) -> None:
        self._stack = ledger.stack
        self._workers = ledger.workers
        self._monotonic = ledger.monotonic
        self._copies = CopyReader(ledger.stack, ledger.counters)
        self._packer = packer

    def load(self, match: Match, deadline_s: float) -> tuple[Restored, list[tuple[bytes, Blob]]]:
        """Return the restored prefix, and those of its blobs that the fastest tier lacks."""
        give_up_at = self._monotonic() + deadline_s
        out = self._packer.layout.empty(match.num_tokens)
        decodes = self._start_decoding(match.reads, out, give_up_at)
        good, reason = self._leading_good(decodes, len(match.reads), give_up_at)
        for decoding in decodes:
            decoding.future.cancel()
        restored = self._assemble(match, good, out, reason)
        return restored, [(x.read.key, x.blob) for x in good if x.level and x.blob is not None]

    # ---- reading

    def _start_decoding(
        self, reads: Sequence[BlobRead], out: KVRun, give_up_at: float
    ) -> list[_Decoding]:
        """Start one decoding for each read, in order; fewer if reading took too long."""
        decodes: list[_Decoding] = []
        first = 0
        for batch, answers in self._read_ahead(reads, give_up_at):
            for read, answer in zip(batch, answers, strict=True):
                target = slice_tokens(out, first, first + read.take)
                decode = partial(self._decode, read, answer, target, give_up_at)
                decodes.append(_Decoding(self._workers.codec(decode), decode))
                first += read.take
        return decodes

    def _read_ahead(
        self, reads: Sequence[BlobRead], give_up_at: float
    ) -> Iterator[tuple[Sequence[BlobRead], list[Answer]]]:
        waiting = deque(reads[i : i + READ_BATCH] for i in range(0, len(reads), READ_BATCH))
        under_way: deque[tuple[Sequence[BlobRead], Future[list[Answer]]]] = deque()
        while waiting or under_way:
            while waiting and len(under_way) < READS_AHEAD:
                batch = waiting.popleft()
                under_way.append((batch, self._workers.read(self._read, batch)))
            batch, future = under_way.popleft()
            answers = self._in_time(future, give_up_at)
            if answers is None:
                return
            yield batch, answers

    def _read(self, reads: Sequence[BlobRead]) -> list[Answer]:
        """Read blobs on a reader thread, with one call for neighbours in the same tier."""
        answers: list[Answer] = []
        for level, group in itertools.groupby(reads, key=lambda x: x.level):
            keys = [x.key for x in group]
            try:
                answers += self._stack.get(level, keys)
            except TierUnavailable as error:
                answers += [error] * len(keys)
        return answers

    def _in_time(self, future: Future[T], give_up_at: float) -> T | None:
        """Return the result, or None if it does not come in time."""
        try:
            return future.result(timeout=max(give_up_at - self._monotonic(), 0.0))
        except TimeoutError:
            return None

    # ---- decoding, on a codec thread or the one that waits

    def _decode(self, read: BlobRead, answer: Answer, target: KVRun, give_up_at: float) -> _Outcome:
        """Unpack the planned tier's copy, else the first good copy of any other tier."""

        def asked(level: int) -> Blob | None:
            if level != read.level:
                reading = self._workers.read(self._stack.get, level, [read.key])
                found = self._in_time(reading, give_up_at)
                if found is None:
                    raise TierUnavailable("no time is left")
                return found[0]
            if isinstance(answer, TierUnavailable):
                raise answer
            return answer

        levels = (read.level, *(i for i in range(len(self._stack)) if i != read.level))
        found = self._copies.read(
            read.key, levels, lambda blob: self._unpack(read, blob, target), asked
        )
        if isinstance(found, str):
            return _Outcome(read, None, reason=found)
        return _Outcome(read, found.level, found.blob, found.value)

    def _unpack(self, read: BlobRead, blob: Blob, target: KVRun) -> StateTree:
        key, first, count, _ = read.span
        if read.span.is_state:
            return self._packer.unpack_snapshot(blob, key, first, count, target)
        self._packer.unpack_run(blob, key, first, count, target)
        return None

    # ---- putting together

    def _leading_good(
        self, decodes: list[_Decoding], num_reads: int, give_up_at: float
    ) -> tuple[list[_Outcome], MissReason | None]:
        good: list[_Outcome] = []
        waiting = iter(decodes)
        for decoding in decodes:
            self._help(decoding, waiting, give_up_at)
            outcome = self._in_time(decoding.future, give_up_at)
            if outcome is None:
                return good, "deadline"
            if outcome.level is None:
                return good, outcome.reason
            good.append(outcome)
        return good, None if len(good) == num_reads else "deadline"

    def _help(self, wanted: _Decoding, waiting: Iterator[_Decoding], give_up_at: float) -> None:
        """Decode blobs that no codec thread has begun, until ``wanted`` is done or time is over."""
        while not wanted.future.done() and self._monotonic() < give_up_at:
            chosen = next((x for x in waiting if x.future.cancel()), None)
            if chosen is None:
                return
            chosen.future = Future()
            chosen.future.set_result(chosen.here())

    def _assemble(
        self, match: Match, good: list[_Outcome], out: list[KVPair], reason: MissReason | None
    ) -> Restored:
        if reason is not None and match.reads and match.reads[-1].span.is_state:
            good = []  # without the state at its end, a run of tokens is unusable
        num_tokens = sum(x.read.take for x in good)
        if num_tokens < match.num_tokens:
            # A late thread may still be writing after the good prefix, so a copy is returned.
            out = [(k.copy(), v.copy()) for k, v in slice_tokens(out, 0, num_tokens)]
        levels = [x.level for x in good if x.level is not None]
        tier = self._stack.name(max(levels)) if levels else None
        state = good[-1].state if good else None
        tokens = match.tokens[:num_tokens]
        return Restored(
            num_tokens,
            out,
            state,
            tier,
            reason,
            tokens,
            self._lossy_tokens(good),
            num_tokens if self._has_lossy_state(good) else 0,
        )

    def _has_lossy_state(self, good: list[_Outcome]) -> bool:
        last = good[-1] if good else None
        if last is None or last.blob is None or not last.read.span.is_state:
            return False
        return self._packer.has_lossy_state(last.blob)

    def _lossy_tokens(self, good: list[_Outcome]) -> int:
        ends = [0]
        for x in good:
            if x.blob is not None and self._packer.is_lossy(x.blob):
                ends.append(x.read.end_token)
        return max(ends)
