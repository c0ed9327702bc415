"""Gives the measuring thread access to vLLM's model: to its modules, and to prompts' scores.

    --logits-processors engines.vllm_plugin.measuring.model_access:ForcedTokens
    --worker-extension-cls engines.vllm_plugin.measuring.model_access.ModelView

The logits processor changes no logits. It notes that a request whose prompt is scored is in the
step: vLLM computes the logits of that prompt next, and the worker extension notes them. vLLM runs
the processor after the model, outside its graphs, on every rank, and with asynchronous scheduling
too. With speculative decoding vLLM allows no logits processors, and the plug-in does not support
speculative decoding either.

vLLM mixes the worker extension into its worker, and calls its method by ``collective_rpc``. It is
needed because a connector has no access to the model, and only the model shows how it rotates its
keys. vLLM itself returns only a few scores for each token of a prompt; all of them pass through the
model's last module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers import logits_processor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.measuring.request_runner import SCORED_FIELD

if TYPE_CHECKING:
    from torch import nn


class ForcedTokens(LogitsProcessor):
    """Notes the steps of scored prompts. Command lines of attached engines have its name."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._scored: dict[int, int] = {}  # the orders' numbers, by index in the batch

    def is_argmax_invariant(self) -> bool:
        return False  # if True, vLLM would not call it while all requests are greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's batch: removals, then additions, then moves."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._scored.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self._scored.pop(index, None)
            if (number := (params.extra_args or {}).get(SCORED_FIELD)) is not None:
                self._scored[index] = number
        for a, b, direction in batch_update.moved:
            x, y = self._scored.pop(a, None), self._scored.pop(b, None)
            if x is not None:
                self._scored[b] = x
            if y is not None and direction == MoveDirectionality.SWAP:
                self._scored[a] = y

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for number in self._scored.values():
            EXCHANGE.expect_rows(number)
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
        # With several modules it is unclear which one vLLM calls; with the option vLLM skips them.
        forbidden = self.vllm_config.cache_config.kv_sharing_fast_prefill
        EXCHANGE.sees_rows = len(last) == 1 and not forbidden
        if EXCHANGE.sees_rows:
            last[0].register_forward_hook(_note)


def _note(module: nn.Module, args: object, logits: torch.Tensor | None) -> None:
    if logits is not None and EXCHANGE.wants_rows():
        EXCHANGE.note_rows(torch.log_softmax(logits.float(), -1).cpu().numpy())
