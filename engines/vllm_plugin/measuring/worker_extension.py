"""Gives the rank's measuring thread access to its model and to the logits of prompts.

    --worker-extension-cls engines.vllm_plugin.measuring.worker_extension.ModelView

vLLM mixes the class into its worker and calls the method by ``collective_rpc``. A connector has no
access to the model, and only the model shows how it rotates its keys. vLLM returns only a few of a
prompt's scores for each token; all of them pass through the model's last module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from engines.vllm_plugin.measuring.exchange import EXCHANGE

if TYPE_CHECKING:
    from torch import nn


class ModelView:
    """Adds one method to vLLM's worker."""

    get_model: Any  # the worker's own
    vllm_config: Any

    def thermocline_show_model(self) -> None:
        """Put the model into ``EXCHANGE``, where the rank's measuring thread reads it."""
        model: nn.Module = self.get_model()
        EXCHANGE.model = model
        last = [x for x in model.modules() if isinstance(x, LogitsProcessor)]
        # With several modules it is unclear which one vLLM calls; the option excludes scored
        # prompts.
        forbidden = self.vllm_config.cache_config.kv_sharing_fast_prefill
        EXCHANGE.sees_rows = len(last) == 1 and not forbidden
        if EXCHANGE.sees_rows:
            last[0].register_forward_hook(_note)


def _note(module: nn.Module, args: object, logits: torch.Tensor | None) -> None:
    if logits is not None and EXCHANGE.wants_rows():
        EXCHANGE.note_rows(torch.log_softmax(logits.float(), -1).cpu().numpy())
