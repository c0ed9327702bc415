"""Chooses tokens by temperature, min_p, top_k, top_p and a seed, after penalties and biases.

Every answer draws from its own chain of random keys, so a seeded answer depends on nothing else in
the batch. The filters are plain mlx operations: mlx_lm's are compiled, and on Linux each new
``top_p`` then calls the C++ compiler for one to two seconds while everybody waits.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import (
    make_frequency_penalty,
    make_logits_processors,
    make_presence_penalty,
    make_repetition_penalty,
)

from engines.mlx_worker.generation import LogitsProcessor, SequenceSampling
from engines.mlx_worker.grammar import GrammarProcessor
from engines.openai.requests import Body

_ALL_TOKENS = 1 << 30

# Below this vLLM, too, takes the most likely token; dividing by less overflows.
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """The request's sampling parameters, defaults filled in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, body: Body) -> SamplingParams:
        """Read them from a request."""
        return cls(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            min_p=body.min_p or 0.0,
        )

    @property
    def greedy(self) -> bool:
        """True if nothing is drawn: the most likely token is taken."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_k == 1


class SeededSampler:
    """Draws from (1, vocab) log-probabilities; has state, so never share one between answers."""

    def __init__(self, params: SamplingParams, seed: int, index: int) -> None:
        self._params = params
        # Hashed, so that answer 1 of seed 7 is not answer 0 of seed 8.
        digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
        self._seed = int.from_bytes(digest, "big")
        # Made on the owner thread, in the first call: arrays belong to the thread that made them.
        self._key: mx.array | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw one token from (1, vocab) log-probabilities; returns (1,)."""
        if self._key is None:
            self._key = mx.random.key(self._seed)
        self._key, step = mx.random.split(self._key, 2)
        return mx.random.categorical(filtered(logprobs, self._params), key=step)


def filtered(logprobs: mx.array, params: SamplingParams) -> mx.array:
    """Turn (..., vocab) log-probabilities into float32 logits, -inf where nothing may be drawn.

    In vLLM's order: temperature, min_p, top_k, top_p. Ties at the edge of top_k stay in.
    """
    scaled = logprobs.astype(mx.float32) / params.temperature
    # Zero for the most likely token: its exponential never underflows, and min_p needs no sum.
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    if params.min_p > 0:
        scaled = mx.where(scaled < math.log(params.min_p), -mx.inf, scaled)
    if params.top_k >= logprobs.shape[-1] or params.top_k == 0:
        return _nucleus(scaled, scaled.shape[-1], params.top_p)
    return _nucleus(scaled, params.top_k, params.top_p)


def _nucleus(scaled: mx.array, top_k: int, top_p: float) -> mx.array:
    """Keep the ``top_k`` best, and of these the fewest that hold ``top_p`` of their mass."""
    size = scaled.shape[-1]
    if top_k == size and top_p >= 1:
        return scaled
    best = mx.sort(scaled, axis=-1)[..., size - top_k :]
    if top_p >= 1:
        return mx.where(scaled < best[..., :1], -mx.inf, scaled)
    mass = mx.exp(best)
    above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + mass[..., :1]
    num_dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    return mx.where(scaled < mx.take_along_axis(best, num_dropped, axis=-1), -mx.inf, scaled)


class GeneratedOnly:
    """Hides the prompt from a processor, which then sees the answer's tokens only."""

    def __init__(self, processor: LogitsProcessor, prompt_tokens: int) -> None:
        self._processor = processor
        self._prompt_tokens = prompt_tokens

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        answer: mx.array = self._processor(tokens[self._prompt_tokens :], logits)
        return answer


class LogitBias:
    """Adds to chosen logits. The arrays are made in the first call, on the owner thread."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._bias = bias
        self._processor: LogitsProcessor | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._processor is None:
            [self._processor] = make_logits_processors(logit_bias=self._bias)
        answer: mx.array = self._processor(tokens, logits)
        return answer


def make_processors(body: Body, prompt_tokens: int) -> list[LogitsProcessor]:
    """Make the processors that a request asks for, in mlx_lm's order, perhaps none.

    The order is bias, repetition, presence, frequency.
    """
    processors: list[LogitsProcessor] = []
    if body.bias:
        processors.append(LogitBias(body.bias))
    if body.repetition_penalty not in (None, 1.0):
        processors.append(make_repetition_penalty(body.repetition_penalty, _ALL_TOKENS))
    if body.presence_penalty:
        presence = make_presence_penalty(body.presence_penalty, _ALL_TOKENS)
        processors.append(GeneratedOnly(presence, prompt_tokens))
    if body.frequency_penalty:
        frequency = make_frequency_penalty(body.frequency_penalty, _ALL_TOKENS)
        processors.append(GeneratedOnly(frequency, prompt_tokens))
    return processors


def sampling_of(
    body: Body, prompt_tokens: int, grammars: Sequence[GrammarProcessor | None]
) -> list[SequenceSampling]:
    """Choose how each answer samples: one for each of ``grammars``, which are applied last."""
    params = SamplingParams.of(body)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    chosen = []
    for i, grammar in enumerate(grammars):
        processors = make_processors(body, prompt_tokens)
        if grammar is not None:
            processors.append(grammar)
        # The batch takes the most likely tokens of all greedy answers in one call.
        sampler = None if params.greedy else SeededSampler(params, seed, i)
        chosen.append(SequenceSampling(sampler, processors))
    return chosen
