"""Decodes all running rows, in a few batches of similar length.

A batch of mlx_lm is padded to its longest row, and padding is real memory: rows x longest. So rows
are kept in buckets by length, and a row that outgrows its bucket moves to the next one. The batch
itself (merge, filter, step, stop sequences) is mlx_lm's ``BatchGenerator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from engines.mlx_worker.generation import FinishReason
from engines.mlx_worker.turn import Caches, LiveRow

# Longest row of each bucket but the last, in tokens.
BUCKET_BOUNDS = (1024, 4096)


@dataclass(frozen=True)
class Step:
    """One token for one row."""

    row: LiveRow
    token: int
    logprobs: mx.array  # (vocab,)
    finish: FinishReason | None = None
    # Of a finished row only: its KV, and how many of its tokens that covers.
    caches: Caches = field(default_factory=list)
    num_cached: int = 0


@dataclass(frozen=True)
class Detached:
    """A row taken out of its batch, its KV, and the token it had sampled but not fed."""

    row: LiveRow
    caches: Caches
    num_cached: int  # tokens that ``caches`` hold
    token: int | None  # None: it had not made its first step
    logprobs: mx.array | None

    def step(self) -> Step | None:
        """Count that token as delivered, as the next step would have done."""
        if self.token is None or self.logprobs is None:
            return None
        stops = PrimedStops(self.row.turn.generation.stop_sequences, self.row.emitted)
        self.row.tokens.append(self.token)
        self.row.remaining -= 1
        finish: FinishReason | None = "length" if self.row.remaining == 0 else None
        if stops.matcher().advance(self.token):
            finish = "stop"
        return Step(self.row, self.token, self.logprobs, finish, self.caches, self.num_cached)


class PrimedStops(StopSequences):
    """Stop sequences of a row that has already emitted tokens, before it moved."""

    def __init__(self, sequences: Sequence[tuple[int, ...]], emitted: Sequence[int]) -> None:
        super().__init__(sequences)
        self._recent = emitted[-max((len(x) for x in sequences), default=1) :]

    def matcher(self) -> StopSequences.Matcher:
        matcher = super().matcher()
        for token in self._recent:
            matcher.advance(token)
        return matcher


class Bucket:
    """One BatchGenerator and the rows in it."""

    def __init__(self, model: Any, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self.rows: dict[int, LiveRow] = {}
        self._generator = self._fresh()

    def _fresh(self) -> Any:
        return BatchGenerator(
            self._model,
            completion_batch_size=self._max_rows,
            prefill_batch_size=self._max_rows,
            # All work of this thread goes to one stream: nothing to synchronise.
            stream=mx.default_stream(mx.default_device()),
        )

    @property
    def longest(self) -> int:
        return max((len(row.tokens) for row in self.rows.values()), default=0)

    @property
    def nbytes(self) -> int:
        return int(self._generator.prompt_cache_nbytes)

    def insert(self, row: LiveRow, caches: Caches) -> None:
        """``caches`` hold all of ``row.tokens`` but the last, and are given away."""
        (uid,) = self._generator.insert(
            [row.tokens[-1:]],
            max_tokens=[row.remaining],
            caches=[caches],
            all_tokens=[row.tokens[:-1]],  # a copy: the generator keeps and extends it
            samplers=[row.guard.sampler],
            logits_processors=[row.guard.processors],
            stop_sequences=[PrimedStops(row.turn.generation.stop_sequences, row.emitted)],
        )
        self.rows[uid] = row

    def step(self) -> list[Step]:
        """One token for every row that had its first step before this one."""
        _, responses = self._generator.next()
        steps = []
        for x in responses:
            finished = x.finish_reason is not None
            row = self.rows.pop(x.uid) if finished else self.rows[x.uid]
            row.tokens.append(x.token)
            row.remaining -= 1
            caches = x.prompt_cache or []
            steps.append(Step(row, x.token, x.logprobs, x.finish_reason, caches, len(row.tokens)))
        return steps

    def detach(self, rows: Sequence[LiveRow]) -> list[Detached]:
        """Take rows out, between two steps."""
        uids = [uid for uid, row in self.rows.items() if row in rows]
        if not uids:
            return []
        unfed = self._unfed()
        kept = self._generator.remove(uids, return_prompt_caches=True)
        detached = []
        for uid in uids:
            row, (token, logprobs) = self.rows.pop(uid), unfed.get(uid, (None, None))
            # Before its first step the last token of the prompt has not been fed.
            num_cached = len(row.tokens) - (token is None)
            detached.append(Detached(row, kept[uid][0], num_cached, token, logprobs))
        return detached

    def _unfed(self) -> dict[int, tuple[int, mx.array]]:
        """The sampled token of each row that the next step would feed, and its distribution.

        mlx_lm has no public name for these. Without them a row that changes its batch would have
        to sample that token again, which a seeded sampler or a grammar must not do.
        """
        batch = self._generator._generation_batch
        if not batch.uids:
            return {}
        tokens = batch._next_tokens.tolist()
        return dict(zip(batch.uids, zip(tokens, batch._next_logprobs, strict=True), strict=True))

    def reset(self) -> list[LiveRow]:
        """Forget everything after a failed step; the rows that were lost."""
        lost = list(self.rows.values())
        self.rows.clear()
        self._generator.close()
        self._generator = self._fresh()
        return lost

    def close(self) -> None:
        self._generator.close()


class Batches:
    """The buckets, shortest first."""

    def __init__(self, model: Any, max_rows: int, bounds: Sequence[int] = BUCKET_BOUNDS) -> None:
        self._bounds = tuple(bounds)
        self.buckets = [Bucket(model, max_rows) for _ in range(len(bounds) + 1)]

    def __len__(self) -> int:
        return sum(len(bucket.rows) for bucket in self.buckets)

    def index_of(self, num_tokens: int) -> int:
        """Which bucket a row of this length belongs to."""
        return sum(num_tokens > bound for bound in self._bounds)

    def insert(self, row: LiveRow, caches: Caches) -> None:
        self.buckets[self.index_of(len(row.tokens))].insert(row, caches)

    def detach(self, rows: Sequence[LiveRow]) -> list[Detached]:
        return [x for bucket in self.buckets for x in bucket.detach(rows)]

    def detach_outgrown(self) -> list[Detached]:
        """Rows that have become too long for their bucket."""
        detached: list[Detached] = []
        for index, bucket in enumerate(self.buckets[:-1]):
            rows = [x for x in bucket.rows.values() if self.index_of(len(x.tokens)) > index]
            if rows:
                detached += bucket.detach(rows)
        return detached

    def close(self) -> None:
        for bucket in self.buckets:
            bucket.close()
