"""Reads the blobs of a plan: each from the fastest tier that has a good copy of it.

Blobs are read in batches, a few ahead of the codec threads. A codec thread verifies each and may
unpack it; the thread that waits for them takes blobs that no codec thread has begun. If a blob is
missing or damaged in one tier, it is looked for in the others. If no tier has it, the blobs before
it are still good. Blobs that are used together are used one by one if one of them is bad. When time
runs out, those read so far are kept, and prefill computes the rest.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeAlias, TypeVar

from kvstore.errors import TierUnavailable, Unusable
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.stack import GoodCopy
from kvstore.session import MissReason
from kvstore.store.planner import BlobRead
from kvstore.tiers.base import Blob
from kvstore.workers import Task

T = TypeVar("T")
S = TypeVar("S")
# Blobs that are read by one call to a tier, and used together: using a small one takes less than
# handing it to a thread. Of a long session more, so that there are few batches of it.
BATCH: Final = 8
MOST_BATCHES: Final = 128
READS_AHEAD: Final = 2  # batches being read while earlier ones are used

# Verifies copies of blobs in a row, and may unpack them; raises ``Unusable`` to reject any.
Use: TypeAlias = Callable[[Sequence[tuple[BlobRead, Blob]]], list[T]]
# The result of asking a tier for a blob.
Answer: TypeAlias = Blob | TierUnavailable | None
# Blobs that are being used by a codec thread, or wait for one.
_Using: TypeAlias = Task[list[GoodCopy[T] | MissReason]]


class BlobReader:
    """Falls back from tier to tier where a copy cannot be used. Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._stack = ledger.stack
        self._workers = ledger.workers
        self._monotonic = ledger.monotonic
        self._index = ledger.index

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
            call = partial(self._good_copies, pairs, use, give_up_at)
            uses.append(Task(self._workers, call))
        return uses

    def _read_ahead(
        self, reads: Sequence[BlobRead], give_up_at: float
    ) -> Iterator[tuple[Sequence[BlobRead], list[Answer]]]:
        size = max(BATCH, len(reads) // MOST_BATCHES)
        waiting = deque(reads[i : i + size] for i in range(0, len(reads), size))
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
        together = self._good_together(answers, use)
        return together or [self._good_copy(x, y, use, give_up_at) for x, y in answers]

    def _good_together(
        self, answers: Sequence[tuple[BlobRead, Answer]], use: Use[T]
    ) -> list[GoodCopy[T] | MissReason]:
        """Use the planned tiers' copies in one call; none of them if one is missing or bad."""
        pairs = [(x, y) for x, y in answers if y is not None and not isinstance(y, TierUnavailable)]
        if len(pairs) < len(answers):
            return []
        try:
            values = use(pairs)
        except Unusable:
            return []
        return [GoodCopy(y, x.level, value) for (x, y), value in zip(pairs, values, strict=True)]

    def _good_copy(
        self, read: BlobRead, answer: Answer, use: Use[T], give_up_at: float
    ) -> GoodCopy[T] | MissReason:
        """Use the planned tier's copy, else the first good copy of any other tier."""

        def copy_in(level: int) -> Blob | None:
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
        return self._stack.good_copy(
            read.key,
            levels,
            lambda blob: use([(read, blob)])[0],
            read=copy_in,
            is_unused=lambda key: bool(self._index.unused([key])),
        )

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
            if not any(x.take() for x in waiting):
                return
