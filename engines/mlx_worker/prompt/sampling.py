"""Chooses tokens by temperature, min_p, top_k, top_p and a seed, after penalties and biases.

Every answer draws from its own chain of random keys, so a seeded answer does not depend on the rest
of the batch. The filters are plain mlx operations: mlx_lm's are compiled, and on Linux each new
``top_p`` then calls the C++ compiler, for which all answers wait one to two seconds.
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

# Below this the most likely token is taken, as in vLLM; dividing by less overflows.
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
        """Return the parameters of a request."""
        return cls(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            min_p=body.min_p or 0.0,
        )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_k == 1


class SeededSampler:
    """Draws tokens for one answer; it has state, so two answers must not share one."""

    def __init__(self, params: SamplingParams, seed: int, index: int) -> None:
        self._params = params
        # Hashed, so that for example answer 1 of seed 7 does not equal answer 0 of seed 8.
        digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
        self._seed = int.from_bytes(digest, "big")
        # Made in the first call, on the owner thread: arrays belong to the thread that made them.
        self._key: mx.array | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw one token from (1, vocab) log-probabilities; return it as (1,)."""
        if self._key is None:
            self._key = mx.random.key(self._seed)
        self._key, step = mx.random.split(self._key, 2)
        return mx.random.categorical(filtered(logprobs, self._params), key=step)


def filtered(logprobs: mx.array, params: SamplingParams) -> mx.array:
    """Return (..., vocab) float32 logits, with -inf for tokens that must not be drawn.

    The order is vLLM's: temperature, min_p, top_k, top_p. Ties at the edge of top_k are kept.
    """
    scaled = logprobs.astype(mx.float32) / params.temperature
    # Shifted so that the maximum is 0: its exponential cannot underflow, and min_p needs no sum.
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    if params.min_p > 0:
        scaled = mx.where(scaled < math.log(params.min_p), -mx.inf, scaled)
    if params.top_k >= logprobs.shape[-1] or params.top_k == 0:
        return _nucleus(scaled, scaled.shape[-1], params.top_p)
    return _nucleus(scaled, params.top_k, params.top_p)


def _nucleus(scaled: mx.array, top_k: int, top_p: float) -> mx.array:
    """Keep the ``top_k`` best tokens, and of these the fewest with ``top_p`` of their mass."""
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
    """A logits processor that passes only the answer's tokens to another, without the prompt."""

    def __init__(self, processor: LogitsProcessor, prompt_tokens: int) -> None:
        self._processor = processor
        self._prompt_tokens = prompt_tokens

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        answer: mx.array = self._processor(tokens[self._prompt_tokens :], logits)
        return answer


class LogitBias:
    """Adds a bias to chosen logits; its arrays are made in the first call, on the owner thread."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._bias = bias
        self._processor: LogitsProcessor | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._processor is None:
            [self._processor] = make_logits_processors(logit_bias=self._bias)
        answer: mx.array = self._processor(tokens, logits)
        return answer


def make_processors(body: Body, prompt_tokens: int) -> list[LogitsProcessor]:
    """Return the logits processors that a request asks for, maybe none, in mlx_lm's order.

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
    """Return the sampling of each answer; ``grammars`` has one, applied last, or None for each."""
    params = SamplingParams.of(body)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    chosen = []
    for i, grammar in enumerate(grammars):
        processors = make_processors(body, prompt_tokens)
        if grammar is not None:
            processors.append(grammar)
        # Without a sampler, the batch takes the most likely tokens of all answers in one call.
        sampler = None if params.greedy else SeededSampler(params, seed, i)
        chosen.append(SequenceSampling(sampler, processors))
    return chosen
