"""Calls a sequence's sampler and logits processors, and keeps what they raise to that sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import mlx.core as mx

from engines.mlx_worker.generation import SequenceSampling

_Step: TypeAlias = Callable[[mx.array], mx.array]
_Process: TypeAlias = Callable[[mx.array, mx.array], mx.array]


class SamplingGuard:
    """Stands between one sequence's sampling and the batched step.

    An exception inside the step would take every other sequence down with it. So the first one is
    remembered in ``fault``, the step goes on with an arbitrary token for this sequence, and the
    batch loop fails its request before that token reaches a client.

    A step samples one token ahead, so the code of a request is also called once after its last
    token. What it raises there spoils nothing.
    """

    def __init__(self, sampling: SequenceSampling) -> None:
        self._sampling = sampling
        self._num_samples = 0
        self.fault: Exception | None = None
        self._first_spoiled = 0

    def spoils(self, num_tokens: int) -> bool:
        """True if one of the first ``num_tokens`` tokens of the answer is arbitrary."""
        return self.fault is not None and self._first_spoiled < num_tokens

    @property
    def sampler(self) -> _Step | None:
        """The guarded sampler; ``None`` for greedy: such sequences share one batched argmax."""
        return None if self._sampling.sampler is None else self._sample

    @property
    def processors(self) -> Sequence[_Process]:
        """The guarded logits processors: one that calls them all, or none."""
        return (self._process,) if self._sampling.logits_processors else ()

    def _sample(self, logprobs: mx.array) -> mx.array:
        """Sample from (1, vocab) log-probabilities; returns (1,), an integer."""
        if not self._sampling.logits_processors:  # else counted there
            self._num_samples += 1
        if self.fault is None and self._sampling.sampler is not None:
            try:
                token: mx.array = self._sampling.sampler(logprobs)
                if token.shape == (1,):
                    return token
                self._spoil(ValueError(f"a sampler returned shape {token.shape}, not (1,)"))
            except Exception as error:  # code of the request: its defects are this sequence's alone
                self._spoil(error)
        return mx.argmax(logprobs, axis=-1)

    def _process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Process (1, vocab) logits, given the tokens so far; returns the same shape."""
        self._num_samples += 1
        if self.fault is not None:
            return logits
        try:
            processed = logits
            for processor in self._sampling.logits_processors:
                processed = processor(tokens, processed)
            if processed.shape == logits.shape:
                return processed
            self._spoil(ValueError(f"logits of shape {logits.shape} became {processed.shape}"))
        except Exception as error:  # as above
            self._spoil(error)
        return logits

    def _spoil(self, error: Exception) -> None:
        self.fault = error
        self._first_spoiled = self._num_samples - 1
