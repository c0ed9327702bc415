"""A ``Generator`` without a model: it generates a test's script, by way of real logits.

The scripted token gets nearly all of the probability, so that logits processors and samplers of a
request do their work on it as they would on a model's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engines.host.work_line import QueueFull
from engines.http import CacheOutcome
from engines.mlx_worker.generation import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Generation,
    ModelFacts,
    PrefillProgress,
    PromptAdmitted,
    Token,
)

# (row, tokens generated so far) -> next token; None = no preference.
Script = Callable[[int, Sequence[int]], int | None]


def silent(row: int, generated: Sequence[int]) -> int | None:
    return None


@dataclass
class ToyOwner:
    vocab_size: int
    max_context: int = 512
    script: Script = silent
    outcome: CacheOutcome = field(default_factory=lambda: CacheOutcome("miss", 0, "never-stored"))
    late_outcome: CacheOutcome | None = None  # of a prompt whose leader leaves
    fail_after: int | None = None  # tokens per row
    overloaded: bool = False
    wait_s: float = 0.0  # in its own line
    prefill_s: float = 0.0
    step_s: float = 0.0
    submitted: list[Generation] = field(default_factory=list)
    streams: list[ToyStream] = field(default_factory=list)

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts("toy", self.max_context, self.vocab_size, True, False)

    def submit(self, generation: Generation) -> ToyStream:
        if self.overloaded:
            raise QueueFull("the waiting line is full")
        self.submitted.append(generation)
        self.streams.append(ToyStream(self, generation))
        return self.streams[-1]


class ToyStream:
    def __init__(self, owner: ToyOwner, generation: Generation) -> None:
        self._owner = owner
        self._generation = generation
        self._live = dict.fromkeys(range(len(generation.sampling)), True)
        self.cancelled = asyncio.Event()
        self.stopped: list[int] = []

    def stop(self, index: int) -> None:
        self.stopped.append(index)

    def cancel(self) -> None:
        self.cancelled.set()

    async def events(self) -> AsyncIterator[Event]:
        generated: list[list[int]] = [[] for _ in self._generation.sampling]
        open_rows = set(range(len(generated)))
        await asyncio.sleep(self._owner.wait_s)
        yield PromptAdmitted(self._owner.outcome)
        await asyncio.sleep(self._owner.prefill_s)
        if self._owner.late_outcome is not None:
            yield PromptAdmitted(self._owner.late_outcome)
        yield PrefillProgress(len(self._generation.prompt), len(self._generation.prompt))
        while open_rows:
            await asyncio.sleep(self._owner.step_s)
            for row in sorted(open_rows):
                if len(generated[row]) == self._owner.fail_after:
                    yield Failed("MemoryError: no room")
                    return
                if self.cancelled.is_set() or row in self.stopped:
                    open_rows.discard(row)
                    yield Finished(row, "cancelled")
                    continue
                token = self._next(row, generated[row])
                generated[row].append(token.id)
                yield token
                if reason := self._reason(generated[row]):
                    open_rows.discard(row)
                    yield Finished(row, reason)

    def _reason(self, generated: Sequence[int]) -> FinishReason | None:
        if (generated[-1],) in self._generation.stop_sequences:
            return "stop"
        return "length" if len(generated) >= self._generation.max_tokens else None

    def _next(self, row: int, generated: Sequence[int]) -> Token:
        context = [*map(int, self._generation.prompt), *generated]
        noise = np.random.default_rng(len(context)).normal(size=(1, self._owner.vocab_size))
        wanted = self._owner.script(row, generated)
        if wanted is not None:
            noise[0, wanted] += 30
        logits = mx.array(noise.astype(np.float32))
        tokens = mx.array(context)
        for processor in self._generation.sampling[row].logits_processors:
            logits = processor(tokens, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampler = self._generation.sampling[row].sampler
        chosen = int((sampler or (lambda x: mx.argmax(x, axis=-1)))(logprobs).item())
        top = self._generation.top_logprobs
        if top is None:
            return Token(row, chosen)
        values = np.array(logprobs)[0]
        best = np.argsort(-values)[:top].tolist()
        return Token(row, chosen, float(values[chosen]), [(x, float(values[x])) for x in best])


def saying(tokens: Sequence[int]) -> Script:
    """Every row says this, and nothing in particular afterwards."""
    return lambda row, generated: tokens[len(generated)] if len(generated) < len(tokens) else None
