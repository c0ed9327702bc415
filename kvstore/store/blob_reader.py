"""Reads the blobs of a plan, each from the fastest tier that has a good copy of it.

Blobs are read in batches, a few ahead of the codec threads. A codec thread *uses* a batch: it
verifies the blobs and may unpack them. The thread that waits for the result uses batches that no
codec thread has begun. If a blob of a batch is missing or damaged, the batch is used blob by blob,
and the other tiers are tried. If no tier has a good copy, only the blobs before it are returned.
When time runs out, the blobs used so far are returned, and prefill computes the rest.
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
# The least number of blobs that one call to a tier reads and one task uses: to use a small blob
# takes less time than to hand it to a thread. Batches of a long session are larger, so that it has
# at most ``MOST_BATCHES``.
BATCH: Final = 8
MOST_BATCHES: Final = 128
READS_AHEAD: Final = 2  # batches being read while earlier ones are used

# Verifies copies of consecutive blobs, and may unpack them; returns a value for each. Raises
# ``Unusable`` if any is bad.
Use: TypeAlias = Callable[[Sequence[tuple[BlobRead, Blob]]], list[T]]
# A tier's answer to a request for a blob; None: it has none.
Answer: TypeAlias = Blob | TierUnavailable | None
# The use of one batch, on a codec thread or still queued.
_Using: TypeAlias = Task[list[GoodCopy[T] | MissReason]]


class BlobReader:
    """Reads blobs and falls back to other tiers where a copy is bad. Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._stack = ledger.stack
        self._workers = ledger.workers
        self._monotonic = ledger.monotonic
        self._index = ledger.index

    def read(
        self, reads: Sequence[BlobRead], use: Use[T], deadline_s: float
    ) -> tuple[list[GoodCopy[T]], MissReason | None]:
        """Return the good blobs before the first bad one, and why they end there. Blocks.

        The reason is None if all are good. ``use`` may still be running for later blobs when this
        returns.
        """
        give_up_at = self._monotonic() + deadline_s
        uses = self._start(reads, use, give_up_at)
        try:
            return self._leading_good(uses, len(reads), give_up_at)
        finally:
            for x in uses:
                x.future.cancel()

    def _start(self, reads: Sequence[BlobRead], use: Use[T], give_up_at: float) -> list[_Using[T]]:
        """Queue the use of all batches, in order; of fewer if reading takes too long."""
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
        """Read blobs, with one call for consecutive ones in the same tier. For a reader thread."""
        answers: list[Answer] = []
        for level, group in itertools.groupby(reads, key=lambda x: x.level):
            keys = [x.key for x in group]
            try:
                answers += self._stack.get(level, keys)
            except TierUnavailable as error:
                answers += [error] * len(keys)
        return answers

    def _in_time(self, future: Future[S], give_up_at: float) -> S | None:
        """Wait for the result of a future; None if it does not come in time."""
        try:
            return future.result(timeout=max(give_up_at - self._monotonic(), 0.0))
        except TimeoutError:
            return None

    # ---- on a codec thread or the thread that waits

    def _good_copies(
        self, answers: Sequence[tuple[BlobRead, Answer]], use: Use[T], give_up_at: float
    ) -> list[GoodCopy[T] | MissReason]:
        together = self._good_together(answers, use)
        return together or [self._good_copy(x, y, use, give_up_at) for x, y in answers]

    def _good_together(
        self, answers: Sequence[tuple[BlobRead, Answer]], use: Use[T]
    ) -> list[GoodCopy[T] | MissReason]:
        """Use all copies from the planned tiers in one call; [] if one is missing or bad."""
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
        """Return the planned tier's copy, else the first good one of the others, or a reason."""

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

    # ---- the results of all batches

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
        """Use batches that no codec thread has begun, until ``wanted`` is done or time runs out."""
        while not wanted.future.done() and self._monotonic() < give_up_at:
            if not any(x.take() for x in waiting):
                return
