"""A logits processor that forces the answers of measuring requests and notes their scores.

For a request whose prompt is scored, it only notes that the request is in the step: vLLM computes
the logits of that prompt next, and ``worker_extension`` notes them.

    --logits-processors engines.vllm_plugin.measuring.forced_tokens:ForcedTokens

It does not change other requests. vLLM runs it after the model, outside its graphs, on every rank,
and with asynchronous scheduling too. With speculative decoding vLLM allows no logits processors,
and the plug-in does not support speculative decoding either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.measuring.request_runner import FORCED_FIELD


@dataclass(frozen=True)
class ForcedRow:
    """A row of the batch whose answer is known in advance.

    ``sampled``: vLLM's own growing list of sampled tokens. ``scored``: the prompt is scored, not
    the answer.
    """

    number: int
    tokens: list[int]
    sampled: list[int]
    scored: bool


class ForcedTokens(LogitsProcessor):
    """Keeps the forced rows by their index in the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, ForcedRow] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's batch: removals, then additions, then moves."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, sampled in batch_update.added:
            self._rows.pop(index, None)
            forced = (params.extra_args or {}).get(FORCED_FIELD)
            if forced is not None:
                number, tokens = forced["number"], forced["tokens"]
                self._rows[index] = ForcedRow(number, tokens, sampled, forced["scored"])
        for a, b, direction in batch_update.moved:
            x, y = self._rows.pop(a, None), self._rows.pop(b, None)
            if x is not None:
                self._rows[b] = x
            if y is not None and direction == MoveDirectionality.SWAP:
                self._rows[a] = y

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Note the scores of forced rows, then allow only one token in each of them.

        ``logits``: fp32 (rows, vocabulary).
        """
        for index, row in self._rows.items():
            if row.scored:
                EXCHANGE.expect_rows(row.number)
                continue
            scores = torch.log_softmax(logits[index].float(), -1)
            EXCHANGE.note_scores(row.number, scores.cpu().numpy())
            if (step := len(row.sampled)) < len(row.tokens):
                logits[index] = float("-inf")
                logits[index, row.tokens[step]] = 0.0
        return logits
