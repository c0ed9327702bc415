"""Keeps Ray from starting tasks that import vLLM once more, for a model that needs no download."""

from __future__ import annotations

from ray.llm._internal.common.callbacks.base import CallbackBase


class LocalModel(CallbackBase):
    """Skips the initialization of nodes, in which Ray downloads models."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
