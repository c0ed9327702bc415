"""The measuring thread's access to vLLM's model: forced answers, scores of prompts, its modules.

    --logits-processors engines.vllm_plugin.measuring.model_access:ForcedTokens
    --worker-extension-cls engines.vllm_plugin.measuring.model_access.ModelView

The logits processor forces the answers of measuring requests and notes their scores. For a request
whose prompt is scored, it only notes that the request is in the step: vLLM computes the logits of
that prompt next, and the worker extension notes them. It does not change other requests. vLLM runs
it after the model, outside its graphs, on every rank, and with asynchronous scheduling too. With
speculative decoding vLLM allows no logits processors, and the plug-in does not support speculative
decoding either.

vLLM mixes the worker extension into its worker and calls the method by ``collective_rpc``. A
connector has no access to the model, and only the model shows how it rotates its keys. vLLM returns
only a few of a prompt's scores for each token; all of them pass through the model's last module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers import logits_processor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.measuring.request_runner import FORCED_FIELD

if TYPE_CHECKING:
    from torch import nn


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


class ModelView:
    """Adds one method to vLLM's worker."""

    get_model: Any  # the worker's own
    vllm_config: Any

    def thermocline_show_model(self) -> None:
        """Put the model into ``EXCHANGE``, where the rank's measuring thread reads it."""
        model: nn.Module = self.get_model()
        EXCHANGE.model = model
        last = [x for x in model.modules() if isinstance(x, logits_processor.LogitsProcessor)]
        # With several modules it is unclear which one vLLM calls; the option excludes scored
        # prompts.
        forbidden = self.vllm_config.cache_config.kv_sharing_fast_prefill
        EXCHANGE.sees_rows = len(last) == 1 and not forbidden
        if EXCHANGE.sees_rows:
            last[0].register_forward_hook(_note)


def _note(module: nn.Module, args: object, logits: torch.Tensor | None) -> None:
    if logits is not None and EXCHANGE.wants_rows():
        EXCHANGE.note_rows(torch.log_softmax(logits.float(), -1).cpu().numpy())
