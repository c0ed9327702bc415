"""Decodes all running sequences, in a few batches of similar length.

A batch of mlx_lm is padded to its longest sequence, and the padding takes memory: the number of
sequences x the longest. So sequences are kept in buckets by length, and one that outgrows its
bucket moves to the next. mlx_lm's ``BatchGenerator`` is the batch itself (merge, filter, step, stop
sequences).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, StopSequences

from engines.mlx_worker.batch.request import Sequence
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.generation import FinishReason, Token
from kvstore.store.states import StateAt

# Longest sequence of each bucket except the last, in tokens.
BUCKET_BOUNDS = (1024, 4096)


@dataclass(frozen=True)
class StepOutput:
    """One token of one sequence."""

    sequence: Sequence
    token: int
    logprobs: mx.array  # (vocab,), before temperature
    finish: FinishReason | None = None
    # For a finished sequence only: its KV, and the number of its tokens in it.
    caches: Caches = field(default_factory=list)
    num_cached: int = 0

    def event(self) -> Token:
        """Return the event that reports this token to the client."""
        top = self.sequence.request.generation.top_logprobs
        return token_event(self.sequence.index, self.token, self.logprobs, top)


def token_event(index: int, token: int, logprobs: mx.array, top: int | None) -> Token:
    """Return the event of one token of sequence ``index``.

    Args:
        logprobs: (vocab,), before temperature, of any float dtype.
        top: number of likeliest tokens to name; None = no log-probabilities at all.
    """
    if top is None:
        return Token(index, token)
    values = np.array(logprobs.astype(mx.float32))
    top = min(top, len(values))
    best = np.argpartition(values, -top)[-top:] if top else np.empty(0, np.intp)
    ranked = sorted(best.tolist(), key=lambda x: (-values[x], x))
    return Token(index, token, float(values[token]), [(x, float(values[x])) for x in ranked])


@dataclass(frozen=True)
class DetachedSequence:
    """A sequence removed from its batch, with its KV and the token it has sampled but not fed."""

    sequence: Sequence
    caches: Caches
    num_cached: int  # tokens that ``caches`` hold
    token: int | None  # None: it had not made its first step
    logprobs: mx.array | None

    def step(self) -> StepOutput | None:
        """Return the sampled token as the next step would have; None if there is none."""
        if self.token is None or self.logprobs is None:
            return None
        sequence = self.sequence
        stops = _ResumedStopSequences(sequence)
        sequence.emitted.append(self.token)
        sequence.remaining -= 1
        finish: FinishReason | None = "length" if sequence.remaining == 0 else None
        if stops.matcher().advance(self.token):
            finish = "stop"
        return StepOutput(sequence, self.token, self.logprobs, finish, self.caches, self.num_cached)


class _ResumedStopSequences(StopSequences):
    """The stop sequences of a sequence that may have emitted tokens before it joined this batch."""

    def __init__(self, sequence: Sequence) -> None:
        stops = sequence.request.generation.stop_sequences
        super().__init__(stops)
        self._recent = sequence.emitted[-max((len(x) for x in stops), default=1) :]

    def matcher(self) -> StopSequences.Matcher:
        matcher = super().matcher()
        for token in self._recent:
            matcher.advance(token)
        return matcher


class LengthBucket:
    """One BatchGenerator and the sequences in it. Belongs to the owner thread."""

    def __init__(self, model: Any, max_sequences: int, state_step: int) -> None:
        self._model = model
        self._max_sequences = max_sequences
        self._state_step = state_step
        self._sequences: dict[int, Sequence] = {}  # by mlx_lm's uid
        self._generator = self._fresh()

    def _fresh(self) -> Any:
        return BatchGenerator(
            self._model,
            completion_batch_size=self._max_sequences,
            prefill_batch_size=self._max_sequences,
            # All work of this thread goes to one stream, so no synchronisation is needed.
            stream=mx.default_stream(mx.default_device()),
        )

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._sequences.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0 = empty."""
        return max((x.num_tokens for x in self._sequences.values()), default=0)

    def insert(self, sequence: Sequence, caches: Caches) -> None:
        """Add a sequence; takes over ``caches``, which hold all its tokens but the last."""
        (uid,) = self._generator.insert(
            [[sequence.last]],
            max_tokens=[sequence.remaining],
            caches=[caches],
            # A copy, since the generator extends it; only logits processors read it.
            all_tokens=[sequence.tokens[:-1].tolist() if sequence.guard.processors else []],
            samplers=[sequence.guard.sampler],
            logits_processors=[sequence.guard.processors],
            stop_sequences=[_ResumedStopSequences(sequence)],
        )
        self._sequences[uid] = sequence

    def step(self) -> list[StepOutput]:
        """Decode one step; return a token for every sequence that had made its first step before.

        A sequence's first step only samples its first token.
        """
        batch = self._generator._generation_batch
        sole = list(batch.prompt_cache) if len(batch.uids) == 1 else []
        _, responses = self._generator.next()
        outputs = []
        for x in responses:
            finished = x.finish_reason is not None
            sequence = self._sequences.pop(x.uid) if finished else self._sequences[x.uid]
            sequence.emitted.append(x.token)
            sequence.remaining -= 1
            caches = x.prompt_cache or []
            if finished and sole:
                caches = [kv_arrays.sole_row(cache) for cache in sole]
            num_cached = sequence.num_tokens
            outputs.append(
                StepOutput(sequence, x.token, x.logprobs, x.finish_reason, caches, num_cached)
            )
        if self._state_step:
            self._take_states()
        return outputs

    def _take_states(self) -> None:
        """Keep the newest state at a chunk's end for the first sequence of each session's request.

        The sequences in mlx_lm's generation batch have made their first step, so all their tokens
        are fed.
        """
        batch = self._generator._generation_batch
        for row, uid in enumerate(batch.uids):
            sequence = self._sequences.get(uid)
            if sequence is None or sequence.index or sequence.request.generation.session is None:
                continue
            num_cached = sequence.num_tokens
            if not num_cached % self._state_step:
                state = kv_arrays.state_of_row(batch.prompt_cache, row)
                sequence.request.answer_state = StateAt(num_cached, state)

    def detach(self, sequences: Collection[Sequence]) -> list[DetachedSequence]:
        """Remove those of ``sequences`` that are in this bucket; call it between two steps."""
        uids = [uid for uid, x in self._sequences.items() if x in sequences]
        if not uids:
            return []
        unfed = self._unfed()
        kept = self._generator.remove(uids, return_prompt_caches=True)
        detached = []
        for uid in uids:
            sequence, (token, logprobs) = self._sequences.pop(uid), unfed.get(uid, (None, None))
            # Before its first step, the prompt's last token has not been fed.
            num_cached = sequence.num_tokens - (token is None)
            detached.append(DetachedSequence(sequence, kept[uid][0], num_cached, token, logprobs))
        return detached

    def _unfed(self) -> dict[int, tuple[int, mx.array]]:
        """Return, by uid, the sampled token that the next step would feed, and its log-probs.

        mlx_lm has no public name for these. Without them, a sequence that changes its batch would
        have to sample that token again, which a seeded sampler or a grammar must not do.
        """
        batch = self._generator._generation_batch
        if not batch.uids:
            return {}
        tokens = batch._next_tokens.tolist()
        return dict(zip(batch.uids, zip(tokens, batch._next_logprobs, strict=True), strict=True))

    def reset(self) -> list[Sequence]:
        """Drop all sequences after a failed step; return them."""
        lost = self.sequences
        self._sequences.clear()
        self._generator.close()
        self._generator = self._fresh()
        return lost

    def close(self) -> None:
        self._generator.close()


class Batches:
    """The buckets, shortest first; belongs to the owner thread, except ``len``."""

    def __init__(self, model: Any, max_sequences: int, state_step: int) -> None:
        """``state_step``: tokens between positions at which states are taken; 0 = none are."""
        count = len(BUCKET_BOUNDS) + 1
        self.buckets = [LengthBucket(model, max_sequences, state_step) for _ in range(count)]

    def __len__(self) -> int:
        return sum(len(bucket.sequences) for bucket in self.buckets)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that are being decoded, over all length buckets."""
        return [x for bucket in self.buckets for x in bucket.sequences]

    def index_of(self, num_tokens: int) -> int:
        """Return the index of the bucket for sequences of this length."""
        return sum(num_tokens > bound for bound in BUCKET_BOUNDS)

    def insert(self, sequence: Sequence, caches: Caches) -> None:
        """Add a sequence to the bucket of its length; takes over ``caches``."""
        self.buckets[self.index_of(sequence.num_tokens)].insert(sequence, caches)

    def detach(self, sequences: Collection[Sequence]) -> list[DetachedSequence]:
        """Remove and return those of ``sequences`` that decode; call it between two steps."""
        return [x for bucket in self.buckets for x in bucket.detach(sequences)]

    def detach_outgrown(self) -> list[DetachedSequence]:
        """Remove and return the sequences that have become too long for their bucket."""
        detached: list[DetachedSequence] = []
        for index, bucket in enumerate(self.buckets[:-1]):
            outgrown = [x for x in bucket.sequences if self.index_of(x.num_tokens) > index]
            if outgrown:
                detached += bucket.detach(outgrown)
        return detached

    def close(self) -> None:
        """Close all buckets; no sequence can be decoded any more."""
        for bucket in self.buckets:
            bucket.close()
