"""Restores the KV of a match: reads its blobs, and unpacks each into its place in the arrays.

Blobs are read in batches, a few ahead of the codec threads. A codec thread verifies each and may
unpack it; the thread that waits for them takes blobs that no codec thread has begun. If a blob is
missing or damaged in one tier, it is looked for in the others. If no tier has it, the blobs before
it are still good. When time runs out, those read so far are kept, and prefill computes the rest.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final, Generic, TypeAlias, TypeVar

from kvstore.blobs.chain import Tokens, no_tokens
from kvstore.blobs.packer import Packer
from kvstore.blobs.snapshot import StateTree
from kvstore.errors import TierUnavailable
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.reading import CopyReader, GoodCopy
from kvstore.session import MissReason, TierName
from kvstore.shapes import KVPair, slice_tokens
from kvstore.store.planner import BlobRead
from kvstore.store.records import SessionRecord
from kvstore.tiers.base import Blob

T = TypeVar("T")
S = TypeVar("S")
READ_BATCH: Final = 8  # blobs per call to a tier
READS_AHEAD: Final = 2  # batches being read while earlier ones are used

# Verifies a copy, and may unpack it; raises ``Unusable`` to reject it.
Use: TypeAlias = Callable[[BlobRead, Blob], T]
# The result of asking a tier for a blob.
Answer: TypeAlias = Blob | TierUnavailable | None


@dataclass
class _Using(Generic[T]):
    """Blobs that are being used by a codec thread, or wait for one."""

    future: Future[list[GoodCopy[T] | MissReason]]
    here: Callable[[], list[GoodCopy[T] | MissReason]]  # does the same on the thread that calls it


class BlobReader:
    """Falls back from tier to tier where a copy cannot be used. Thread-safe."""

    def __init__(self, ledger: Ledger[Any], together: int = 1) -> None:
        """Set ``together`` to the number of blobs that a thread uses at a time."""
        self._together = together
        self._stack = ledger.stack
        self._workers = ledger.workers
        self._monotonic = ledger.monotonic
        self._copies = CopyReader(ledger.stack, ledger.counters)

    def read(
        self, reads: Sequence[BlobRead], use: Use[T], deadline_s: float
    ) -> tuple[list[GoodCopy[T]], MissReason | None]:
        """Return the leading good blobs, and why there are no more of them. Blocks.

        ``use`` may still be running for later blobs when this returns.
        """
        give_up_at = self._monotonic() + deadline_s
        uses = self._start(reads, use, give_up_at)
        try:
            return self._leading_good(uses, len(reads), give_up_at)
        finally:
            for x in uses:
                x.future.cancel()

    def _start(self, reads: Sequence[BlobRead], use: Use[T], give_up_at: float) -> list[_Using[T]]:
        """Start the use of all blobs, in order; of fewer if reading took too long."""
        uses: list[_Using[T]] = []
        for batch, answers in self._read_ahead(reads, give_up_at):
            pairs = list(zip(batch, answers, strict=True))
            for i in range(0, len(pairs), self._together):
                some = pairs[i : i + self._together]
                call = partial(self._good_copies, some, use, give_up_at)
                uses.append(_Using(self._workers.codec(call), call))
        return uses

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

    def _in_time(self, future: Future[S], give_up_at: float) -> S | None:
        """Return the result, or None if it does not come in time."""
        try:
            return future.result(timeout=max(give_up_at - self._monotonic(), 0.0))
        except TimeoutError:
            return None

    # ---- on a codec thread or the one that waits

    def _good_copies(
        self, answers: Sequence[tuple[BlobRead, Answer]], use: Use[T], give_up_at: float
    ) -> list[GoodCopy[T] | MissReason]:
        return [self._good_copy(x, answer, use, give_up_at) for x, answer in answers]

    def _good_copy(
        self, read: BlobRead, answer: Answer, use: Use[T], give_up_at: float
    ) -> GoodCopy[T] | MissReason:
        """Use the planned tier's copy, else the first good copy of any other tier."""

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
        return self._copies.read(read.key, levels, partial(use, read), asked)

    # ---- all of them

    def _leading_good(
        self, uses: Sequence[_Using[T]], num_reads: int, give_up_at: float
    ) -> tuple[list[GoodCopy[T]], MissReason | None]:
        good: list[GoodCopy[T]] = []
        waiting = iter(uses)
        for x in uses:
            self._help(x, waiting, give_up_at)
            copies = self._in_time(x.future, give_up_at)
            if copies is None:
                return good, "deadline"
            for copy in copies:
                if isinstance(copy, str):
                    return good, copy
                good.append(copy)
        return good, None if len(good) == num_reads else "deadline"

    def _help(self, wanted: _Using[T], waiting: Iterator[_Using[T]], give_up_at: float) -> None:
        """Use blobs that no codec thread has begun, until ``wanted`` is done or time is over."""
        while not wanted.future.done() and self._monotonic() < give_up_at:
            chosen = next((x for x in waiting if x.future.cancel()), None)
            if chosen is None:
                return
            chosen.future = Future()
            chosen.future.set_result(chosen.here())


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


class Restorer:
    """Thread-safe; every ``load`` works on arrays of its own."""

    def __init__(self, ledger: Ledger[SessionRecord], packer: Packer) -> None:
        self._stack = ledger.stack
        self._reader = BlobReader(ledger)
        self._packer = packer

    def load(self, match: Match, deadline_s: float) -> tuple[Restored, list[tuple[bytes, Blob]]]:
        """Return the restored prefix, and those of its blobs that the fastest tier lacks."""
        out = self._packer.layout.empty(match.num_tokens)
        ends = dict(zip(match.reads, accumulate(x.take for x in match.reads), strict=True))

        def unpack(read: BlobRead, blob: Blob) -> StateTree:
            target = slice_tokens(out, ends[read] - read.take, ends[read])
            key, first, count, _ = read.span
            if read.span.is_state:
                return self._packer.unpack_snapshot(blob, key, first, count, target)
            self._packer.unpack_run(blob, key, first, count, target)
            return None

        good, reason = self._reader.read(match.reads, unpack, deadline_s)
        slow = [(x.key, y.blob) for x, y in zip(match.reads, good, strict=False) if y.level]
        return self._assemble(match, good, out, reason), slow

    def _assemble(
        self,
        match: Match,
        good: Sequence[GoodCopy[StateTree]],
        out: list[KVPair],
        reason: MissReason | None,
    ) -> Restored:
        if reason is not None and match.reads and match.reads[-1].span.is_state:
            good = []  # without the state at its end, a run of tokens is unusable
        if not good:
            return Restored(0, self._packer.layout.empty(0), None, None, reason)
        reads = match.reads[: len(good)]
        num_tokens = sum(x.take for x in reads)
        if num_tokens < match.num_tokens:
            # A late thread may still be writing after the good prefix, so a copy is returned.
            out = [(k.copy(), v.copy()) for k, v in slice_tokens(out, 0, num_tokens)]
        lossy = [x for x, y in zip(reads, good, strict=True) if self._packer.is_lossy(y.blob)]
        is_lossy_state = reads[-1].span.is_state and self._packer.has_lossy_state(good[-1].blob)
        return Restored(
            num_tokens,
            out,
            good[-1].value,
            self._stack.name(max(x.level for x in good)),
            reason,
            match.tokens[:num_tokens],
            max((x.end_token for x in lossy), default=0),
            num_tokens if is_lossy_state else 0,
        )
