"""Calls a row's sampler and logits processors, and keeps whatever they raise to that row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import mlx.core as mx

from engines.mlx_worker.generation import Row

_Step: TypeAlias = Callable[[mx.array], mx.array]
_Process: TypeAlias = Callable[[mx.array, mx.array], mx.array]


class Guard:
    """Stands between one row and the batched step.

    An exception inside the step would take every other row down with it. So the first one is
    remembered in ``fault``, the step goes on with an arbitrary token for this row, and the owner
    fails the row's request before that token reaches anybody.

    A step samples one token ahead, so the code of a request is also called once behind its last
    token. What it raises there spoils nothing.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        self._num_samples = 0
        self.fault: Exception | None = None
        self._first_spoiled = 0

    def spoils(self, num_tokens: int) -> bool:
        """True if one of the row's first ``num_tokens`` answer tokens is arbitrary."""
        return self.fault is not None and self._first_spoiled < num_tokens

    @property
    def sampler(self) -> _Step | None:
        """``None`` for greedy: rows without a sampler of their own share one batched argmax."""
        return None if self._row.sampler is None else self._sample

    @property
    def processors(self) -> Sequence[_Process]:
        return (self._process,) if self._row.logits_processors else ()

    def _sample(self, logprobs: mx.array) -> mx.array:
        """(1, vocab) -> (1,)"""
        if not self._row.logits_processors:  # else counted there
            self._num_samples += 1
        if self.fault is None and self._row.sampler is not None:
            try:
                token: mx.array = self._row.sampler(logprobs)
                if token.shape == (1,):
                    return token
                self._spoil(ValueError(f"a sampler returned shape {token.shape}, not (1,)"))
            except Exception as error:  # code of the request: its defects are this row's alone
                self._spoil(error)
        return mx.argmax(logprobs, axis=-1)

    def _process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Tokens so far and (1, vocab) -> (1, vocab)"""
        self._num_samples += 1
        if self.fault is not None:
            return logits
        try:
            processed = logits
            for processor in self._row.logits_processors:
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
