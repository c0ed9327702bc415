"""Shows the rank its model.

    --worker-extension-cls engines.vllm_plugin.measuring.worker_extension.ModelView

vLLM mixes the class into its worker and calls the method by ``collective_rpc``. A connector does
not get to see the model, and how it turns its keys can only be read off it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.vllm_plugin.measuring.exchange import EXCHANGE

if TYPE_CHECKING:
    from torch import nn


class ModelView:
    """One method for vLLM's worker."""

    get_model: Any  # the worker's own

    def thermocline_show_model(self) -> None:
        """Put the model where the rank's measuring thread finds it."""
        model: nn.Module = self.get_model()
        EXCHANGE.model = model
