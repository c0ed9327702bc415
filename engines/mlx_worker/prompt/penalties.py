"""Logits processors of an answer: bias and penalties, by mlx_lm's own functions.

Presence and frequency penalties count the tokens generated so far and never the prompt's, as
OpenAI documents them; the repetition penalty is not OpenAI's and counts both, as in vLLM.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.sample_utils import (
    make_frequency_penalty,
    make_logits_processors,
    make_presence_penalty,
    make_repetition_penalty,
)

from engines.mlx_worker.generation import LogitsProcessor
from engines.openai.requests import Body

_ALL_TOKENS = 1 << 30


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
